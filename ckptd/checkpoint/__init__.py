"""Checkpoints at rest: the records of a run, reading, verifying, what to keep. Async, over any backend; no daemon."""
