"""The seam of the local backend over a :class:`Disk`: the same calls, the same errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Executor

from ckptd_backends.files import Files, FileState, Room
from tests.power.disk import Disk, File, Folder


class PowerLost(BaseException):
    """No process goes on; nor does any ``except`` stop it."""


class ModelFiles(Files):
    """What one process does; ``stopped``: it does nothing any more."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.stopped = False
        self._open: dict[int, File] = {}

    # Files

    def create(self, path: str) -> int:
        folder, name = self._place(path)
        if name in folder.live:
            raise _error(errno.EEXIST, path)
        file = File(self.disk.next_number(), self.disk.tick(), names=1)
        folder.change({name: file})
        self._did_change("create")
        return self._descriptor(file)

    def open(self, path: str) -> int:
        return self._descriptor(self._file(path))

    def open_to_lock(self, path: str) -> int:
        return self.open(path)

    def lock(self, descriptor: int) -> bool:
        file = self._at(descriptor)
        if file.locked is not None and file.locked != (self, descriptor) and not file.locked[0].stopped:
            return False
        file.locked = (self, descriptor)
        return True

    def close(self, descriptor: int) -> None:
        file = self._at(descriptor)
        del self._open[descriptor]
        if file.locked == (self, descriptor):
            file.locked = None

    def set_direct(self, descriptor: int, direct: bool) -> None:
        self._at(descriptor)  # a drive's own cache forgets what was written directly too

    def allocate(self, descriptor: int, size: int) -> None:
        file = self._at(descriptor)
        file.live.extend(bytes(max(0, size - len(file.live))))
        self._did_change("allocate")

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        file = self._at(descriptor)
        stop = offset + len(data)
        file.live.extend(bytes(max(0, stop - len(file.live))))
        file.live[offset:stop] = data
        file.written.append((offset, stop))
        file.modified_seconds = self.disk.tick()
        self._did_change("write")
        return len(data)

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        data = self._at(descriptor).live[offset : offset + len(out)]
        out[: len(data)] = data
        return len(data)

    def read_parts(self, descriptor: int, outs: Sequence[memoryview], offset: int) -> int:
        done = 0
        for out in outs:
            done += self.read(descriptor, out, offset + done)
        return done

    async def read_small(self, path: str, limit_bytes: int, executor: Executor) -> bytes:
        self._go()
        return bytes(self._file(path).live[:limit_bytes])

    def fsync(self, descriptor: int) -> None:
        self._at(descriptor).sync()
        self._did_change("fsync")

    # Names

    def link(self, descriptor: int, target: str) -> None:
        file = self._at(descriptor)
        folder, name = self._place(target)
        if name in folder.live:
            raise _error(errno.EEXIST, target)
        if not file.names:
            raise _error(errno.ENOENT, target)
        file.names += 1
        folder.change({name: file})
        self._did_change("link")

    def rename_noreplace(self, source: str, target: str) -> None:
        folder, name = self._place(target)
        if name in folder.live:
            raise _error(errno.EEXIST, target)
        self.rename(source, target)

    def rename(self, source: str, target: str) -> None:
        (folder, old), (to_folder, new) = self._place(source), self._place(target)
        assert folder is to_folder, "the model has no renames from folder to folder"
        file = self._file(source)
        replaced = folder.live.get(new)
        if isinstance(replaced, Folder):
            raise _error(errno.EISDIR, target)
        if replaced is not None:
            replaced.names -= 1
        folder.change({old: None, new: file})
        self._did_change("rename")

    def unlink(self, path: str) -> None:
        file = self._file(path)
        folder, name = self._place(path)
        file.names -= 1
        folder.change({name: None})
        self._did_change("unlink")

    # Folders

    def make_directory(self, path: str) -> None:
        folder, name = self._place(path)
        if name in folder.live:
            raise _error(errno.EEXIST, path)
        folder.change({name: Folder(self.disk.next_number(), self.disk.tick())})
        self._did_change("make_directory")

    def remove_directory(self, path: str) -> None:
        self._go()
        if self.disk.folder(path).live:
            raise _error(errno.ENOTEMPTY, path)
        folder, name = self._place(path)
        folder.change({name: None})
        self._did_change("remove_directory")

    def fsync_directory(self, path: str) -> None:
        self._go()
        self.disk.folder(path).sync()
        self._did_change("fsync_directory")

    # Looking

    def state(self, path: str) -> FileState:
        self._go()
        return _state(os.path.basename(path), self.disk.find(path))

    def state_of(self, descriptor: int) -> FileState:
        return _state("", self._at(descriptor))

    def names(self, path: str) -> list[tuple[str, bool]]:
        self._go()
        return [(name, isinstance(node, Folder)) for name, node in self.disk.folder(path).live.items()]

    def list(self, path: str) -> list[FileState]:
        self._go()
        return [_state(name, node) for name, node in self.disk.folder(path).live.items()]

    def room(self, path: str) -> Room:
        self._go()
        return Room(1 << 40, None)

    def resolved(self, path: str) -> str:
        return path

    # Details

    def _go(self) -> None:
        if self.stopped:
            raise PowerLost

    def _did_change(self, what: str) -> None:
        self.disk.did_change(what)
        self._go()

    def _descriptor(self, file: File) -> int:
        number = max(self._open, default=0) + 1
        self._open[number] = file
        return number

    def _at(self, descriptor: int) -> File:
        self._go()
        return self._open[descriptor]

    def _place(self, path: str) -> tuple[Folder, str]:
        self._go()
        return self.disk.folder(os.path.dirname(path)), os.path.basename(path)

    def _file(self, path: str) -> File:
        self._go()
        node = self.disk.find(path)
        if isinstance(node, Folder):
            raise _error(errno.EISDIR, path)
        return node


def _state(name: str, node: File | Folder) -> FileState:
    is_file = isinstance(node, File)
    size = len(node.live) if is_file else 0
    links = node.names if is_file else 1
    return FileState(name, size, node.modified_seconds, (1, node.number), is_file, not is_file, links)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
