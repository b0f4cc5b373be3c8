"""Names in storage. Never made from user strings; no key is another's prefix at a ``/``.

A key is segments of ``[A-Za-z0-9._=-]`` joined by ``/``. Numbers are zero-padded, so that a listing in order of key is
a listing in order of step; they are parsed as integers all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptd.errors import FormatError

_SEGMENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._=-]{1,200}"
KEY_PATTERN = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,7}}")

RUN = "run.json"
GENERATIONS = "generations/"
CHECKPOINTS = "checkpoints/"
MANIFESTS = "manifests/"
MARKS = "marks/"
LEASES = "leases/"
TOMBSTONES = "tombstones/"
AGREEMENT = "agreement/"
TIERS = "tiers/"
LOG = "log/"

STEP_MAX = 10**12 - 1
GENERATION_MAX = 10**6 - 1
RANK_MAX = 10**5 - 1


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Which checkpoint: a step, written in a generation. Ordered by generation first only where code says so."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"{self.step:012d}-g{self.generation:06d}"


_VERSION = re.compile(r"([0-9]{12})-g([0-9]{6})")


def parse_version(text: str) -> Version:
    """The inverse of ``str(version)``. Raises :class:`FormatError`."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise FormatError(f"not a checkpoint name: {text[:80]!r}")
    return Version(int(match[1]), int(match[2]))


def generation_key(generation: int) -> str:
    """The record of a generation; put if absent."""
    return f"{GENERATIONS}{generation:06d}.json"


def manifest_key(version: Version) -> str:
    """The commit; put if absent."""
    return f"{MANIFESTS}{version}.json"


def checkpoint_prefix(version: Version) -> str:
    """Where the data of a checkpoint lies."""
    return f"{CHECKPOINTS}{version}/"


def shard_key(version: Version, rank: int, world: int, attempt: str) -> str:
    """Each attempt has its own name, so that a writer that wakes up late harms nothing."""
    return f"{checkpoint_prefix(version)}rank-{rank:05d}-of-{world:05d}-{attempt}.safetensors"


def receipt_key(version: Version, rank: int, world: int) -> str:
    """The first receipt of a rank wins: it names the attempt that counts."""
    return f"{checkpoint_prefix(version)}rank-{rank:05d}-of-{world:05d}.json"


def index_key(version: Version, number: int) -> str:
    """A part of an index that lies outside its manifest; put if absent."""
    return f"{checkpoint_prefix(version)}index-{number:05d}.json"


def receipts_key(version: Version, number: int) -> str:
    """A part of the list of receipts that lies outside its manifest; put if absent."""
    return f"{checkpoint_prefix(version)}receipts-{number:05d}.json"


def common_key(version: Version) -> str:
    """What the state trees of all ranks have in common; put if absent."""
    return f"{checkpoint_prefix(version)}common.json"


def mark_key(version: Version, kind: str, unique: str) -> str:
    """A mark. ``unique``: a token that nobody else uses."""
    return f"{MARKS}{version}/{kind}-{unique}.json"


def tombstone_key(version: Version) -> str:
    """The announcement of a deletion; put if absent."""
    return f"{TOMBSTONES}{version}.json"


def tier_prefix(tier: int) -> str:
    """Where the daemons of several nodes leave each other what they need for a further or node-local tier."""
    return f"{TIERS}{tier}/"


def exchanged_key(tier: int, key: str) -> str:
    """Where a small object of a tier of node-local disks lies for the other nodes; put if absent."""
    return f"{tier_prefix(tier)}{key}"


def copy_prefix(tier: int) -> str:
    """Where it stands what is being copied to a tier."""
    return f"{tier_prefix(tier)}copies/"


def copy_key(tier: int, version: Version) -> str:
    """Rank 0's daemon copies this checkpoint to the tier, and the others are to do the same."""
    return f"{copy_prefix(tier)}{version}.json"


def probe_key(unique: str) -> str:
    """An object by which the ranks find out whether they see the same place; deleted at once."""
    return f"{TIERS}probe-{unique}.json"


_LOG = re.compile(rf"{LOG}([0-9]{{6}})/rank-([0-9]{{5}})-([0-9a-f]{{32}})-([0-9]{{12}})-([0-9]{{12}})\.json")


def log_prefix(generation: int) -> str:
    """Where the segments of the training log lie that a generation has written."""
    return f"{LOG}{generation:06d}/"


@dataclass(frozen=True, slots=True, order=True)
class LogKey:
    """The name of a segment of the training log."""

    generation: int
    rank: int
    life: str
    """Of the trainer: 32 hexadecimal digits."""
    first: int
    """The number of its first row; the life's first row is 1."""
    last: int

    def __str__(self) -> str:
        return f"{log_prefix(self.generation)}rank-{self.rank:05d}-{self.life}-{self.first:012d}-{self.last:012d}.json"

    @classmethod
    def parse(cls, key: str) -> LogKey:
        """The inverse of ``str``. Raises :class:`FormatError`."""
        match = _LOG.fullmatch(key)
        if match is None:
            raise FormatError(f"not the name of a log segment: {key[:80]!r}")
        return cls(int(match[1]), int(match[2]), match[3], int(match[4]), int(match[5]))
