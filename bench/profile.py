"""Where ckptd's own time goes: ``python -m bench.profile --help``.

Processor time beside elapsed time, each operation in turn with a bare copy or a bare read of as many bytes, and of
several tries the least: so that it can be read on a machine that other programs use as well.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from bench.__main__ import size
from bench.disk import read_direct, write_direct
from bench.probes import Memory, descendants, forget_files
from bench.state import Replica, TrainingState
from bench.subject import files_of
from bench.subjects.ckptd import Eager, Overlapped

LINES_SHOWN = 45


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds."""

    elapsed: float
    cpu: float
    """Of this process, all threads."""

    def __str__(self) -> str:
        return f"{self.elapsed * 1e3:9.2f} ms elapsed {self.cpu * 1e3:9.2f} ms CPU"


def _cost(call: Callable[[], object]) -> _Cost:
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return _Cost(time.perf_counter() - began, time.process_time() - cpu)


def _least(costs: list[_Cost]) -> _Cost:
    return _Cost(min(cost.elapsed for cost in costs), min(cost.cpu for cost in costs))


def _daemon_cpu() -> float:
    total = 0.0
    for process in descendants():
        times: psutil._common.pcputimes = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _show(what: str, ours: _Cost, bare: _Cost) -> None:
    print(f"{what:24s}{ours}; bare {bare}; rate {bare.elapsed / ours.elapsed:.2f} of it, CPU {ours.cpu / bare.cpu:.2f}×")


class _Profile:
    def __init__(self, state_bytes: int, tensors: int | None, look: str, tries: int, folder: Path) -> None:
        self.state = TrainingState(state_bytes, tensors)
        self.replica = Replica(self.state)
        self.bytes = sum(tensor.nbytes for tensor in self.state.tensors().values())
        self.count = len(self.state.tensors())
        self.look = look
        self.tries = tries
        self.folder = folder
        self.number = 0

    def _looked_at(self, what: str, call: Callable[[], object]) -> Callable[[], object]:
        if what != self.look:
            return call

        def profiled() -> None:
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(call)
            profile.dump_stats(f"/tmp/profile-{what}.prof")
            pstats.Stats(profile).sort_stats("tottime").print_stats(LINES_SHOWN)

        return profiled

    def saves(self, kind: type[Overlapped]) -> None:
        """Steady saves; leaves a daemon with the last of them in memory, which the replica keeps."""
        self.subject = subject = kind(self.state, self.folder)
        subject.open()
        before = Memory.now()
        calls: list[_Cost] = []
        copies: list[_Cost] = []
        stalls: list[float] = []
        daemon: list[float] = []
        durable: list[float] = []
        for i in range(self.tries + 2):
            self.number += 1
            self.state.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            subject.stepped(self.number)
            copies.append(_cost(self.replica.take))
            used, began = _daemon_cpu(), time.perf_counter()
            save = subject.save
            call = self._looked_at("save", lambda: save(self.number)) if i == self.tries + 1 else None
            if call is not None:
                handles: list[object] = []
                profile = self._looked_at("save", lambda: handles.append(save(self.number)))
                calls.append(_cost(profile))
                handle = handles[0]
            else:
                handles = []
                calls.append(_cost(lambda: handles.append(save(self.number))))
                handle = handles[0]
            handle.wait_copied()
            stalls.append(time.perf_counter() - began)
            handle.wait_durable()
            durable.append(time.perf_counter() - began)
            daemon.append(_daemon_cpu() - used)
        steady, copy = _least(calls[2 : self.tries + 1]), _least(copies[1:])
        name = kind.__name__
        _show(f"save() {name}", steady, copy)
        above = steady.cpu - (copy.cpu if kind is Eager else 0)
        print(f"{'':24s}{above / self.count * 1e6:.2f} µs CPU a tensor above the copy; first call {calls[0]}")
        print(f"{'':24s}stall {min(stalls[2:]) * 1e3:.2f} ms, durable {min(durable[2:]) * 1e3:.1f} ms")
        print(f"{'':24s}daemon {min(daemon[2:]):.3f} CPU s, {min(daemon[2:]) / self.bytes * 1e9:.3f} s/GB")
        after = Memory.now()
        print(f"{'':24s}memory: private {(after.private - before.private) / 2**20:.0f} MiB")

    def restores(self, *, memory: bool) -> None:
        what = "memory" if memory else "disk"
        probe = self.folder / "probe"
        if not memory and not probe.exists():
            write_direct(probe, self.replica.memory)
        kept = [tensor.clone() for tensor in self.state.tensors().values()]
        ours: list[_Cost] = []
        bare: list[_Cost] = []
        for i in range(self.tries):
            self.subject.restart(keep_memory=memory)
            self.state.wipe()
            if memory:
                bare.append(_cost(self.replica.take))
            else:
                forget_files([*files_of(self.subject.stored(self.number)), probe])
                bare.append(_cost(lambda: read_direct(probe, self.replica.memory)))
            call = lambda: self.subject.restore(self.number)
            ours.append(_cost(self._looked_at(what, call) if i == self.tries - 1 else call))
            for live, other in zip(self.state.tensors().values(), kept, strict=True):
                assert torch.equal(live, other), "differs"
        if self.look == what:
            ours.pop()
        _show(f"restore, {what}", _least(ours), _least(bare))


def profile(
    state_bytes: Annotated[int, typer.Option("--bytes", parser=size)] = 512_000_000,
    tensors: Annotated[int | None, typer.Option(min=4)] = None,
    tries: int = 5,
    look: Annotated[str, typer.Option(help="save, memory or disk: where its time goes, function by function.")] = "",
    folder: Path = Path("build/bench"),
) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = _Profile(state_bytes, tensors, look, tries, Path(place))
        print(f"{found.bytes / 1e6:.0f} MB in {found.count} tensors")
        for kind in (Eager, Overlapped) if not look or look == "save" else (Overlapped,):
            found.folder = Path(place) / kind.__name__
            found.folder.mkdir()
            found.saves(kind)
            if kind is Eager:
                found.subject.close()
        found.restores(memory=True)
        found.restores(memory=False)
        found.subject.close()


if __name__ == "__main__":
    typer.run(profile)
