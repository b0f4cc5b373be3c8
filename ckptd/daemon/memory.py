"""How much memory an arena may still take, before the kernel would kill somebody for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptd.daemon.cgroups import own_folders, text_of
from ckptd.errors import ResourceError
from ckptd.limits import KIB

RESERVE_FRACTION = 0.05
"""Of the machine's or cgroup's memory, left to everything else."""
_UNLIMITED = 1 << 60
"""Version 1 of cgroups says no limit by a number like this."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Where a version of cgroups says what."""

    limit: str
    used: str
    cache: tuple[str, ...]
    """Fields of ``memory.stat`` that the kernel gives back under pressure. Shared memory is not among them."""


_OF_VERSION = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: _Files("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def headroom_bytes() -> int:
    """What can be allocated now: the least of the machine's available memory and of each cgroup's limit less what it
    uses (reclaimable file cache not counted), less a reserve. Never negative."""
    left = _machine("MemAvailable") - int(_machine("MemTotal") * RESERVE_FRACTION)
    for folder, version in own_folders("memory"):
        files = _OF_VERSION[version]
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None and limit < _UNLIMITED:
            left = min(left, limit - int(limit * RESERVE_FRACTION) - used + _cache(folder, files))
    return max(left, 0)


def _machine(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise ResourceError(f"/proc/meminfo does not say {name}")


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdigit() else None  # "max": no limit


def _cache(folder: Path, files: _Files) -> int:
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(stat[name]) for name in files.cache)
    except (OSError, ValueError, KeyError):
        return 0
