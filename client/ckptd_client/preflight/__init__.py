"""Trying machines before a run: what needs torch. ``ckptd preflight`` is the command; see :mod:`ckptd.health`."""
