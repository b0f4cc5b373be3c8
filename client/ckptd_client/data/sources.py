"""Where a stream's records come from: named shards, each read from a record on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ckptd.errors import UsageError

CHUNK_TOKENS = 1 << 16
"""So many tokens of a token file are one record."""


@runtime_checkable
class Source(Protocol):
    """Records in shards. Must give the same records each time, and be picklable where workers are spawned.

    A source that cannot tell how many records a shard has is read in full by whoever wants a later record.
    """

    @property
    def shards(self) -> Sequence[str]:
        """Names of the shards, each once. They are what a checkpoint knows the source by, so they must not depend on
        where the data lies."""
        ...

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        """The records of a shard in order, without the first ``offset``."""
        ...


@runtime_checkable
class Counted(Source, Protocol):
    """A source in which records are passed over without being read. Opening at any offset should be cheap."""

    def count(self, shard: str) -> int:
        """Records in a shard."""
        ...


@runtime_checkable
class Sized(Counted, Protocol):
    """A source of token sequences in which tokens are passed over without being read."""

    def sizes(self, shard: str) -> Sequence[int] | npt.NDArray[np.int64]:
        """Tokens in each record of a shard."""
        ...


class Sequences:
    """Shards that are sequences in memory, or anything with a length and an index: a map-style dataset."""

    def __init__(self, shards: Mapping[str, Any]) -> None:
        self._shards = dict(shards)
        self.shards: Sequence[str] = tuple(self._shards)

    def count(self, shard: str) -> int:
        return len(self._shards[shard])

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        records = self._shards[shard]
        return (records[index] for index in range(offset, len(records)))


class LineFiles:
    """Text files, a record a line without its end: JSON lines, for one. Passing over a line means reading it."""

    def __init__(self, folder: str | Path, pattern: str = "*.jsonl") -> None:
        """Shards are the files that match, in order of name. Raises :class:`UsageError` where there is none."""
        self._folder = Path(folder)
        self.shards: Sequence[str] = _matching(self._folder, pattern)

    def open(self, shard: str, offset: int) -> Iterator[str]:
        with open(self._folder / shard, encoding="utf-8", newline="\n") as lines:
            for line in islice(lines, offset, None):
                yield line.removesuffix("\n")


class TokenFiles:
    """Files of nothing but tokens, mapped into memory. For packing: records are runs of tokens without meaning."""

    def __init__(self, folder: str | Path, pattern: str = "*.bin", *, dtype: str = "uint16") -> None:
        """Shards are the files that match, in order of name. Raises :class:`UsageError` where there is none, or one
        does not hold whole tokens."""
        self._folder = Path(folder)
        self._dtype = np.dtype(dtype)
        self.shards: Sequence[str] = _matching(self._folder, pattern)
        self._tokens = {shard: self._measure(shard) for shard in self.shards}

    def count(self, shard: str) -> int:
        return -(-self._tokens[shard] // CHUNK_TOKENS)

    def sizes(self, shard: str) -> npt.NDArray[np.int64]:
        starts = np.arange(0, self._tokens[shard], CHUNK_TOKENS, dtype=np.int64)
        return np.minimum(self._tokens[shard] - starts, CHUNK_TOKENS)

    def open(self, shard: str, offset: int) -> Iterator[npt.NDArray[Any]]:
        if offset < self.count(shard):
            tokens: npt.NDArray[Any] = np.memmap(self._folder / shard, self._dtype, mode="r")
            for start in range(offset * CHUNK_TOKENS, len(tokens), CHUNK_TOKENS):
                yield tokens[start : start + CHUNK_TOKENS]

    def _measure(self, shard: str) -> int:
        tokens, odd = divmod((self._folder / shard).stat().st_size, self._dtype.itemsize)
        if odd:
            raise UsageError(f"{self._folder / shard} does not hold whole tokens of {self._dtype}")
        return tokens


def _matching(folder: Path, pattern: str) -> tuple[str, ...]:
    shards = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern)))
    if not shards:
        raise UsageError(f"{folder} has no file {pattern}")
    return shards
