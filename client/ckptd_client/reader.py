"""Reading a checkpoint without a run of one's own: lazy, and nothing is handed out unverified."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from types import EllipsisType, TracebackType
from typing import Any, Self, cast

import torch

from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import Selector
from ckptd.checkpoint.tensors import StoredTensor, find_tensor, read_region
from ckptd.errors import FormatError, UsageError, near
from ckptd.format.keys import Version
from ckptd.format.records import Box
from ckptd.format.tree import decode_json, decode_tree
from ckptd.storage import Backend, Limits, StorageOptions, open_backend, with_standard_wrappers
from ckptd_client.blocking import BlockingLoop
from ckptd_client.capture import codecs
from ckptd_client.dtypes import torch_dtype

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


def open_checkpoint(
    url: str, step: Selector = "latest", *, storage_options: StorageOptions | None = None, rank: int | None = None
) -> CheckpointView:
    """A checkpoint of the run at ``url``, for reading only: opens no generation and changes nothing of the run.

    ``step``: ``"latest"``, a step, or step and generation as in ``"1000-g3"``. ``rank``: whose values to see where each
    rank has its own; not needed for a checkpoint of one rank.

    Raises :class:`ckptd.errors.NoCheckpoint` where there is none, :class:`ckptd.errors.StorageError` where the store
    cannot tell, :class:`ckptd.errors.IntegrityError` for what is damaged.
    """
    loop = BlockingLoop()
    backend = with_standard_wrappers(open_backend(url, storage_options), Limits())
    try:
        reader = loop.run(_open(backend, step))
        if rank is not None and not 0 <= rank < reader.manifest.world:
            raise UsageError(f"rank {rank} of a checkpoint of {reader.manifest.world} ranks")
    except BaseException:
        loop.run(backend.aclose())
        loop.close()
        raise
    return CheckpointView(loop, reader, rank)


async def _open(backend: Backend, step: Selector) -> CheckpointReader:
    run = await Run.open(backend)
    holder = holder_here("open_checkpoint")
    return await CheckpointReader.open(run, await run.resolve(step), holder=holder)


class TensorView:
    """A tensor in a checkpoint. Only what is indexed is read and verified; the rest stays where it is."""

    def __init__(self, loop: BlockingLoop, reader: CheckpointReader, stored: StoredTensor) -> None:
        self._loop = loop
        self._reader = reader
        self._stored = stored
        self.name = stored.name
        self.dtype = torch_dtype(stored.dtype)
        self.shape = torch.Size(stored.shape)

    def tensor(self) -> torch.Tensor:
        """All of it, in new memory on the CPU."""
        return self._read(Box((0,) * len(self.shape), tuple(self.shape)))

    def __getitem__(self, index: Index) -> torch.Tensor:
        """A part, by integers, slices and ``...``, as torch indexes; in new memory on the CPU."""
        box, rest = _bounding_box(index, tuple(self.shape))
        return self._read(box)[rest]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"TensorView({self.name!r}, {self.dtype}, {list(self.shape)})"

    def _read(self, box: Box) -> torch.Tensor:
        wanted = region(tuple(self.shape), box)
        data = torch.empty(wanted.element_count * self.dtype.itemsize, dtype=torch.uint8)
        self._loop.run(read_region(self._reader, self._stored, wanted, memoryview(cast(Any, data.numpy()))))
        return data.view(self.dtype).reshape(box.lengths)


class CheckpointView(Mapping[str, TensorView]):
    """The tensors of a checkpoint by name, such as ``model/layers.0.weight``; tied names included.

    To be closed, best by ``with``: until then the checkpoint is protected from being deleted.
    """

    def __init__(self, loop: BlockingLoop, reader: CheckpointReader, rank: int | None) -> None:
        self._loop = loop
        self._reader = reader
        self.world = reader.manifest.world
        self.rank = 0 if rank is None and self.world == 1 else rank
        self._close = weakref.finalize(self, _close, loop, reader)
        self._close.atexit = False  # no thread can be started any more; the lease expires by itself

    @property
    def version(self) -> Version:
        """Step and generation."""
        return self._reader.version

    @property
    def step(self) -> int:
        return self.version.step

    @property
    def metrics(self) -> dict[str, float | None]:
        """What the training step reported."""
        return dict(self._reader.manifest.metrics)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names at the top of the state, such as ``model``."""
        return self._reader.manifest.parts

    @property
    def tree(self) -> dict[str, Any]:
        """Everything that was saved, as it was nested, with a :class:`TensorView` for each tensor and numpy array.
        Plain values come back as they were, and an enum whose class this program lacks as its value.

        Of several ranks each has a tree of its own: raises :class:`UsageError` where ``rank`` was not given.
        """
        if self.rank is None:
            raise UsageError(f"each of {self.world} ranks has its own values", hint="open it with rank=0, say")
        snapshot = self._loop.run(self._reader.receipt(self.rank)).snapshot
        tree = decode_tree(decode_json(bytes(snapshot.tree)), self._leaf)
        if not isinstance(tree, dict):
            raise FormatError("the state tree is not a dict of parts")
        return cast("dict[str, Any]", tree)

    def __getitem__(self, name: str) -> TensorView:
        found = self._loop.run(find_tensor(self._reader, name, self.rank))
        if found is None:
            meant = near(name, self)
            raise KeyError(f"{name}: no such tensor" + (f"; near is {', '.join(meant)}" if meant else ""))
        return TensorView(self._loop, self._reader, found)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._loop.run(find_tensor(self._reader, name, self.rank)) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._loop.run(self._names()))

    def __len__(self) -> int:
        return len(self._loop.run(self._names()))

    def __repr__(self) -> str:
        return f"CheckpointView({self._reader.run.backend.url!r}, step={self.step}, rank={self.rank})"

    def close(self) -> None:
        """Release the checkpoint. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _names(self) -> list[str]:
        names, aliases = {entry.name async for entry in self._reader.entries()}, await self._reader.aliases()
        if self.rank is not None:
            layout = (await self._reader.receipt(self.rank)).layout
            names |= {entry.name for entry in layout.tensors if entry.per_rank}
            aliases = layout.aliases
        tied = {alias for alias, name in aliases.items() if name in names}
        return sorted(names | tied)

    def _leaf(self, tag: str, members: dict[str, Any]) -> object:
        value = decode_tree(members.get("v"), self._leaf)
        if tag == "tensor":
            return self[str(value)]
        if tag == "ndarray":
            return value
        try:
            return codecs.decode(tag, members, value)
        except FormatError:
            if tag != "enum":
                raise
            return value


def _close(loop: BlockingLoop, reader: CheckpointReader) -> None:
    async def close() -> None:
        async with contextlib.aclosing(reader.run.backend):
            await reader.aclose()

    loop.run(close())
    loop.close()


def _bounding_box(index: Index, shape: tuple[int, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box that holds what is indexed, and how to index that box."""
    items = index if isinstance(index, tuple) else (index,)
    dots = [at for at, item in enumerate(items) if item is ...]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
    before, after = (items[: dots[0]], items[dots[0] + 1 :]) if dots else (items, ())
    full = (*before, *[slice(None)] * (len(shape) - len(before) - len(after)), *after)
    offsets: list[int] = []
    lengths: list[int] = []
    rest: list[int | slice] = []
    for item, size in zip(full, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise ValueError("the step of a slice must be greater than zero")
            offsets.append(start)
            lengths.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
        elif isinstance(item, int):
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for a dimension of size {size}")
            offsets.append(item % size)
            lengths.append(1)
            rest.append(0)
        else:
            raise TypeError(f"only integers, slices and ... read a part, not {item!r}; index tensor() by anything else")
    return Box(tuple(offsets), tuple(lengths)), tuple(rest)
