"""Data in an order that can be taken up again: loaders whose position is what the trainer was given."""

from ckptd_client.data.loader import ResumableLoader

__all__ = ["ResumableLoader"]
