"""Watching over trainers: who makes no progress, what is known of it, and what is done about it.

``decision``, ``stragglers``, ``durations`` and ``rules`` are pure: values in, values out, no clock. The rest reads
pages, pulls levers and writes reports around them.
"""
