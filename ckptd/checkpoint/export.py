"""Exporting: a checkpoint as plain safetensors and JSON that need no ckptd to be read.

One file for each part of the state, such as ``model.safetensors``, with names as inside that part; cut into several
with an index beside them, as is usual, where it is large. Tensors that are one rank's own lie in ``PART.rank-00000…``
where there are several ranks. ``state.json`` (``state.rank-00000.json`` …) has everything that is no tensor, and
``export.json`` says what this is.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.objects import token
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.tensors import StoredTensor, of_index, of_rank, read_region
from ckptd.errors import AccessDenied, StorageError, StorageFull, UsageError
from ckptd.format.dtypes import ITEM_BYTES, element_count, stored_as
from ckptd.format.records import Span
from ckptd.format.shard import StoredPiece, file_order, lay_out
from ckptd.limits import MIB

FILE_BYTES_MAX = 5_000_000_000
"""A larger file is begun anew; a single tensor may be larger."""
EXPORT_WINDOW_BYTES = 32 * MIB
"""Of a tensor in memory at once."""

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")

OnProgress = Callable[[int, int], None]
"""Called with the bytes written so far, and the bytes of all tensors."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    files: tuple[str, ...]
    bytes: int
    """Of tensors."""


@dataclass(slots=True)
class _Group:
    """Tensors that go together: a part of the state, of the world or of one rank."""

    stem: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    """By their names inside the part."""

    def cut(self) -> list[tuple[str, list[tuple[str, StoredTensor]]]]:
        """File name → what lies in it."""
        files: list[list[tuple[str, StoredTensor]]] = [[]]
        size = 0
        for name, tensor in self.tensors.items():
            if files[-1] and size + tensor.size_bytes > FILE_BYTES_MAX:
                files.append([])
                size = 0
            files[-1].append((name, tensor))
            size += tensor.size_bytes
        if len(files) == 1:
            return [(f"{self.stem}.safetensors", files[0])]
        return [(f"{self.stem}-{i + 1:05d}-of-{len(files):05d}.safetensors", held) for i, held in enumerate(files)]


async def export(reader: CheckpointReader, folder: Path, *, on_progress: OnProgress | None = None) -> Exported:
    """Write the checkpoint into ``folder``, which must be empty or not exist, and appears complete or not at all.

    Every byte is verified on its way. Memory is bounded, whatever the sizes. Raises :class:`UsageError` for a folder
    that holds something, :class:`StorageError` where it cannot be written, and what the reader raises.
    """
    try:
        target, partial = await in_thread(_prepare, folder)
        try:
            done = await _export(reader, partial, on_progress)
            await in_thread(_publish, partial, target)
            return done
        finally:
            await in_thread(shutil.rmtree, partial, ignore_errors=True)
    except OSError as error:
        raise _folder_error(error, folder) from error


def _prepare(folder: Path) -> tuple[Path, Path]:
    """The folder, absolute, and a new one beside it to write in."""
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder", hint="name one that is empty or does not exist")
    partial = folder.parent / f".{folder.name}.partial-{token()}"
    partial.mkdir(parents=True)
    return folder, partial


def _publish(partial: Path, folder: Path) -> None:
    _fsync_folder(partial)
    os.rename(partial, folder)  # replaces an empty folder, never one that has filled meanwhile
    _fsync_folder(folder.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_error(error: OSError, folder: Path) -> Exception:
    text = f"cannot export to {folder}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return AccessDenied(text)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(text)
    return StorageError(text)


async def _export(reader: CheckpointReader, folder: Path, on_progress: OnProgress | None) -> Exported:
    groups = await _groups(reader)
    total = sum(tensor.size_bytes for group in groups for tensor in group.tensors.values())
    room = shutil.disk_usage(folder).free
    if room < total:
        raise StorageFull(f"{folder.parent} has room for {room} bytes, and the export needs {total}")
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    files: list[str] = []
    for group in groups:
        cut = group.cut()
        for name, held in cut:
            await _write_tensors(reader, folder / name, held, advance)
            files.append(name)
        if len(cut) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.size_bytes for tensor in group.tensors.values())},
                "weight_map": {tensor: name for name, held in cut for tensor, _ in held},
            }
            files.append(await _write_json(folder, f"{group.stem}.safetensors.index.json", index))
    for rank in range(reader.manifest.world):
        _, snapshot, _ = await reader.receipt(rank)
        name = f"state{_of_rank(reader, rank)}.json"
        await in_thread(_write_file, folder / name, bytes(snapshot.tree))
        files.append(name)
    files.append(await _write_json(folder, "export.json", _description(reader, groups, files)))
    return Exported(tuple(files), total)


def _description(reader: CheckpointReader, groups: Sequence[_Group], files: Sequence[str]) -> dict[str, object]:
    manifest = reader.manifest
    dtypes = {f"{group.stem}/{name}": held.dtype for group in groups for name, held in group.tensors.items()}
    return {
        "ckptd_export": 1,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "world": manifest.world,
        "parts": manifest.parts,
        "metrics": manifest.metrics,
        "files": list(files),
        "stored_as_bytes": {name: dtype for name, dtype in dtypes.items() if stored_as(dtype, ())[1]},
    }


def _of_rank(reader: CheckpointReader, rank: int) -> str:
    return f".rank-{rank:05d}" if reader.manifest.world > 1 else ""


async def _groups(reader: CheckpointReader) -> list[_Group]:
    """Everything that there is, in groups. Aliases are written out, so that each file is complete by itself."""
    groups: dict[tuple[str, str], _Group] = {}
    stems: dict[str, str] = {}

    def add(name: str, tensor: StoredTensor, suffix: str) -> None:
        part, _, inside = name.partition("/")
        stem = stems.setdefault(part, part if _PLAIN.fullmatch(part) else f"part-{len(stems):03d}")
        group = groups.setdefault((part, suffix), _Group(f"{stem}{suffix}"))
        group.tensors[inside or part] = tensor

    async for entry in reader.entries():
        add(entry.name, of_index(entry), "")
    for rank in range(reader.manifest.world):
        suffix = _of_rank(reader, rank)
        _, _, layout = await reader.receipt(rank)
        own = {
            entry.name: of_rank(entry, rank)
            for entry in layout.tensors
            if entry.per_rank and await reader.find(entry.name) is None  # where it is equal on all ranks, it is theirs
        }
        for name, tensor in own.items():
            add(name, tensor, suffix)
        for alias, name in layout.aliases.items():
            if name in own:
                add(alias, own[name], suffix)
            elif (shared := await reader.find(name)) is not None:
                add(alias, of_index(shared), "")
    return list(groups.values())


async def _write_tensors(
    reader: CheckpointReader, path: Path, held: Sequence[tuple[str, StoredTensor]], advance: Callable[[int], None]
) -> None:
    pieces = [StoredPiece(name, tensor.dtype, tensor.shape) for name, tensor in held]
    layout = lay_out(pieces)
    file = await in_thread(path.open, "xb", 0)
    try:
        await in_thread(file.write, layout.header)
        for i in file_order(pieces):
            async for data in _windows(reader, held[i][1]):
                await in_thread(_write_all, file.fileno(), data)
                advance(len(data))
        await in_thread(os.fsync, file.fileno())
    finally:
        await in_thread(file.close)


async def _windows(reader: CheckpointReader, tensor: StoredTensor) -> AsyncIterator[memoryview]:
    """The tensor's bytes in row-major order, a window at a time; each is valid until the next."""
    item, elements = ITEM_BYTES[tensor.dtype], element_count(tensor.shape)
    at_once = EXPORT_WINDOW_BYTES // item
    buffer = memoryview(bytearray(min(at_once, elements) * item))
    for start in range(0, elements, at_once):
        stop = min(start + at_once, elements)
        window = buffer[: (stop - start) * item]
        await read_region(reader, tensor, region(tensor.shape, Span(start, stop)), window)
        yield window


async def _write_json(folder: Path, name: str, value: object) -> str:
    await in_thread(_write_file, folder / name, json.dumps(value, indent=1).encode())
    return name


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
