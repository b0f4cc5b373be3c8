"""What a rank holds of a tensor, and how that is cut."""

from __future__ import annotations

import msgspec
import torch
from msgspec.structs import replace

from ckptd.format.records import Box, Span


class Part(msgspec.Struct, frozen=True):
    """What a rank holds of one tensor."""

    local: torch.Tensor
    """Detached, as it is in memory: it may be strided, expanded, or on a device."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box | None
    span: Span | None
    """Which part of the global tensor ``local`` is, row-major; neither: all of it. Of a span ``local`` is flat."""
    replicas: tuple[int, ...]
    """Ranks that hold this very part, ascending, this one among them; ``()``: not known to be shared, so the rank's
    own."""
    more: tuple[Part, ...] = ()
    """Further boxes of the same tensor, where what the rank holds is not one: see :meth:`each`."""
    led: bool = False
    """Between two forwards the replicas may differ, and the value is that of the first of them."""

    @property
    def whole(self) -> bool:
        return self.box is None and self.span is None

    @property
    def description(self) -> object:
        """All of it but the memory."""
        pieces = [(piece.box, piece.span, tuple(piece.local.shape)) for piece in self.each()]
        return self.shape, self.local.dtype, pieces, self.replicas, self.led

    def each(self) -> tuple[Part, ...]:
        """All that the rank holds of the tensor, one box or span each."""
        return (self, *self.more)

    @property
    def rows(self) -> int:
        """Between which it may be cut: of the first dimension of what is held."""
        return self.local.shape[0] if self.local.dim() else 1

    def cut(self, start: int, stop: int) -> Part:
        """The rows from ``start`` to ``stop``, as a view of the same memory."""
        if (start, stop) == (0, self.rows):
            return replace(self, more=()) if self.more else self
        local = self.local.narrow(0, start, stop - start)
        if self.span is not None:
            span = Span(self.span.start + start, self.span.start + stop)
            return Part(local, self.shape, None, span, self.replicas, led=self.led)
        offsets = self.box.offsets if self.box is not None else (0,) * len(self.shape)
        lengths = self.box.lengths if self.box is not None else self.shape
        box = Box((offsets[0] + start, *offsets[1:]), (stop - start, *lengths[1:]))
        return Part(local, self.shape, box, None, self.replicas, led=self.led)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor without gradient."""
    tensor = tensor.detach()
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def holds_nothing(tensor: torch.Tensor, shape: tuple[int, ...]) -> Part:
    """Of a rank that has seen the tensor, and owns no element of it. ``tensor`` tells dtype and device."""
    nothing = bare(tensor).new_empty((0,))
    if shape:
        return Part(nothing, shape, Box((0,) * len(shape), (0,) * len(shape)), None, ())
    return Part(nothing, shape, None, Span(0, 0), ())
