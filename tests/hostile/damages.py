"""What happens to the bytes of an object, whoever reads them afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def changed(change: Callable[[bytearray], object]) -> Callable[[Path, Path], None]:
    """A damage that changes bytes of the object alone."""

    def damage(path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return damage


def flip(data: bytearray) -> None:
    """One bit, of the last tensor, of the last members."""
    data[-10] ^= 2


def truncate(data: bytearray) -> None:
    """The last third."""
    del data[len(data) * 2 // 3 :]


def swap(path: Path, other: Path) -> None:
    """Each with the other's bytes."""
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def put_bomb(path: Path, folder: Path) -> None:
    """A pickle that makes a folder there, called ``exploded``, whoever loads it."""
    path.write_bytes(b"cos\nmkdir\n(S'%s'\ntR." % os.fsencode(folder / "exploded"))
