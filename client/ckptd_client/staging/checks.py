"""Finding a mixture: was a tensor written between the call to ``save()`` and the end of its copy?

Two witnesses. The version counter, which in-place operations and most optimizers raise; fused optimizers and writes
through ``.data`` do not. And samples: a few elements of each tensor, read at the call and again from the copy. A write
that raises no version and touches none of the sampled elements is seen only by the full comparison.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

SAMPLE_ELEMENTS = 16
"""Per tensor, spread evenly; smaller tensors are sampled whole."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def equal_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, so that nan equals itself and 0.0 differs from -0.0. Both contiguous, of one dtype and shape."""
    if left.numel() == 0:
        return True
    return torch.equal(_as_integers(left.detach()), _as_integers(right.to(left.device)))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


def data_pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor lies in memory."""
    return [tensor.data_ptr() for tensor in tensors]


class Watched:
    """Contiguous tensors that are copied together again and again, each copy to the same offset of some slot."""

    def __init__(self, names: Sequence[str], sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        """``copies``: views of one slot; those given later are views of any."""
        self.names = names
        self.sources = sources
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, source in enumerate(sources):
            groups.setdefault((source.device, source.dtype), []).append(number)
        self.samples = [
            _Samples(numbers, [sources[n] for n in numbers], [copies[n] for n in numbers])
            for numbers in groups.values()
        ]


class Witness:
    """What is seen of watched tensors at a call to ``save()``. Made by it: about 1 µs a tensor; no device is waited
    for."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._versions = [source._version for source in watched.sources]
        self._fence_versions: list[int] | None = None
        self._seen = [samples.of_sources() for samples in watched.samples]

    def at_fence(self) -> None:
        """Read the versions as the optimizer's step begins: whatever it raises afterwards is behind the fence."""
        self._fence_versions = [source._version for source in self._watched.sources]

    def changed(self, copies: Sequence[torch.Tensor], *, in_full: bool) -> str | None:
        """The name of a tensor that was written before its copy was done, or ``None``. Called from any thread."""
        names, sources = self._watched.names, self._watched.sources
        # In this order: a step that raised a version had been announced by at_fence() before.
        now = [source._version for source in sources]
        now = self._fence_versions or now
        for name, before, after in zip(names, self._versions, now, strict=True):
            if before != after:
                return name
        for samples, seen in zip(self._watched.samples, self._seen, strict=True):
            differing = samples.differing(seen, copies)
            if differing is not None:
                return names[differing]
        if in_full:
            for name, source, copy in zip(names, sources, copies, strict=True):
                if not equal_bytes(source, copy):
                    return name
        return None


class _Samples:
    """Samples of tensors of one device and dtype.

    Of the sources a view each is kept, of the copies only where their samples lie in the slot: to make a view costs
    more than all the rest.
    """

    def __init__(self, numbers: Sequence[int], sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        self._numbers = numbers
        sizes = [source.numel() for source in sources]
        counts = [min(size, SAMPLE_ELEMENTS) for size in sizes]
        steps = [max(1, size // SAMPLE_ELEMENTS) for size in sizes]
        with torch.no_grad():
            self._views = [
                source.as_strided((count,), (step,), source.storage_offset())
                for source, count, step in zip(sources, counts, steps, strict=True)
            ]
        self._stops = list(accumulate(counts))
        first = [int(copy.storage_offset()) for copy in copies]
        within = torch.arange(self._stops[-1]) - _spread([0, *self._stops[:-1]], counts)
        self._places = _spread(first, counts) + _spread(steps, counts) * within

    def of_sources(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(self._views)

    def differing(self, seen: torch.Tensor, copies: Sequence[torch.Tensor]) -> int | None:
        """The number of the first tensor whose copy differs from what was seen of it, or ``None``."""
        item_bytes = seen.element_size()
        slot = torch.empty(0, dtype=torch.uint8).set_(copies[self._numbers[0]].untyped_storage()).view(-1, item_bytes)
        differs = slot[self._places] != seen.cpu().view(torch.uint8).view(-1, item_bytes)
        if not differs.any():
            return None
        return self._numbers[bisect_right(self._stops, int(differs.nonzero()[0][0]))]


def _spread(values: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Each value as often as its count says."""
    return torch.tensor(values).repeat_interleave(torch.tensor(counts))
