"""ckptd: an asynchronous checkpoint service for PyTorch training.

This package is the core and the daemon. It imports neither torch nor a cloud library, nor its siblings
``ckptd_client`` (what a trainer imports) and ``ckptd_backends`` (where the bytes go).
"""

__version__ = "0.1.0"
