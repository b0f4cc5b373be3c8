"""The cgroups that this process is in, of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def own_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """This process's folder of a controller (``memory``, ``cpu``), and all above it, each with its version of cgroups.
    Folders that are not mounted here have no files."""
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root, version = CGROUPS, 2
        elif controller in controllers.split(","):
            root, version = CGROUPS / controller, 1
        else:
            continue
        folder = root / inside.strip("/")
        while folder.is_relative_to(root):
            yield folder, version
            folder = folder.parent


def text_of(path: Path) -> str:
    """What a file of a cgroup says; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
