"""Copies from CUDA devices, on a side stream into the pinned arena. Unverified until it has run on a GPU.

A tensor that anything may change is cloned on the compute stream, in order with the computation, and moved from the
clone. A large one that only optimizers change, and that has not earned overlap yet, is moved on the compute stream
itself, which costs no device memory. What has earned it is moved on the side stream, and the compute stream waits for
that copy, by an event, before the next optimizer step; the host does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ckptd.arena import Arena
from ckptd_client.capture import Leaf

_log = logging.getLogger(__name__)
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream per device on which ckptd moves data."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    return _side_streams[device]


class Transfers:
    """What the devices owe to one snapshot. Empty where nothing lies on a CUDA device."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._overlapped: list[tuple[torch.device, torch.cuda.Event]] = []
        self._clones: list[torch.Tensor] = []

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def at_call(self, leaves: Sequence[Leaf], targets: Sequence[torch.Tensor]) -> None:
        """Order the copies of the CUDA tensors among ``leaves`` with the computation so far; returns without
        waiting."""
        for device in {leaf.tensor.device for leaf in leaves if leaf.tensor.is_cuda}:
            compute = torch.cuda.current_stream(device)
            clones: list[tuple[torch.Tensor, torch.Tensor]] = []
            with torch.no_grad():
                for leaf, target in zip(leaves, targets, strict=True):
                    if leaf.tensor.device != device:
                        continue
                    if leaf.fenced:
                        target.copy_(leaf.tensor, non_blocking=True)
                    else:
                        clones.append((target, leaf.tensor.clone()))
            so_far = self._record(compute)
            if clones:
                self._move_aside(device, so_far, clones)

    def overlapped(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Start the copies of the CUDA tensors among ``sources`` on side streams, behind the computation so far."""
        for device in {source.device for source in sources if source.is_cuda}:
            so_far = torch.cuda.Event()  # type: ignore[no-untyped-call]
            so_far.record(torch.cuda.current_stream(device))
            pairs = [(t, s) for s, t in zip(sources, targets, strict=True) if s.device == device]
            self._overlapped.append((device, self._move_aside(device, so_far, pairs)))

    def hold_step(self) -> None:
        """Make the compute streams wait for the overlapped copies; the host goes on."""
        for device, event in self._overlapped:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Block this thread, without the GIL, until all is in host memory."""
        for event in self._events:
            event.synchronize()
        self._clones.clear()

    def _move_aside(
        self, device: torch.device, behind: torch.cuda.Event, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event:
        side = side_stream(device)
        side.wait_event(behind)
        with torch.cuda.stream(side), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(side)
        self._clones += [source for _, source in pairs]  # kept until they were moved
        return self._record(side)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events.append(event)
        return event


def device_in_use() -> torch.device | None:
    """The calling thread's CUDA device, where the program uses CUDA at all; never initializes it."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def pin(arena: Arena, device: torch.device) -> None:
    """Page-lock the arena for direct transfers, in the context of ``device``. Where the system does not allow it, warn:
    copies then go through pageable memory, slower, and right all the same."""
    with torch.cuda.device(device):
        status = int(_runtime().cudaHostRegister(_address(arena), arena.shape.size_bytes, 0))
    if status != 0:
        _log.warning("the arena could not be page-locked (CUDA status %s): copies are slower", status)


def unpin(arena: Arena) -> None:
    """Before the arena is unmapped. One that was not pinned is left as it is."""
    _runtime().cudaHostUnregister(_address(arena))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(arena: Arena) -> int:
    return torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
