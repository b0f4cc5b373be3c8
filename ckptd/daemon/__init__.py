"""The sidecar: one process per node that owns the arenas, streams snapshots to storage and commits them."""
