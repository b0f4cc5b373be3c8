"""Data in an order that can be taken up again: loaders whose position is what the trainer was given."""

from ckptd_client.data.loader import ResumableLoader
from ckptd_client.data.reshape import PerRank, Reshapes
from ckptd_client.data.sources import Counted, LineFiles, Sequences, Sized, Source, TokenFiles
from ckptd_client.data.stream import ResumableStream

__all__ = [
    "Counted",
    "LineFiles",
    "PerRank",
    "Reshapes",
    "ResumableLoader",
    "ResumableStream",
    "Sequences",
    "Sized",
    "Source",
    "TokenFiles",
]
