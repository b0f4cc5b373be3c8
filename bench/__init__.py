"""The benchmark: ckptd and its peers on the same state, in the same loop, on the same disk, in one run.

A *subject* is one way of saving and restoring. A *turn* is one subject in a process of its own: so that threads, locks,
descriptors and memory of one do not touch another, and a peer may need an interpreter of its own. A *round* gives each
subject a turn; the next round goes through them backwards. See ``docs/benchmarks.md``.
"""
