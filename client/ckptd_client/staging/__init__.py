"""Staging: the copy of the live state into a slot, consistent as of the call to ``save()``."""
