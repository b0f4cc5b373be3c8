"""Storage backends for ckptd, the wrappers around them, and the suite that all of them pass."""
