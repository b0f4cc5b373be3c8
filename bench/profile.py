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

import torch
import typer

from bench.__main__ import size
from bench.disk import read_direct, write_direct
from bench.probes import Cpu, Memory, forget_files, sync_files
from bench.state import Replica, TrainingState
from bench.subject import Handle, Subject, files_of
from bench.subjects.ckptd import Eager, Overlapped
from bench.subjects.safetensors_file import Safetensors
from bench.subjects.torch_save import TorchSave

LINES_SHOWN = 40
WARM_UPS = 2
SETTLE_SECONDS = 0.3
"""After a checkpoint is complete the daemon may still delete an older one, which belongs to the save."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds."""

    elapsed: float
    cpu: float
    """Of this process, all threads."""

    def __str__(self) -> str:
        return f"{self.elapsed * 1e3:9.2f} ms elapsed {self.cpu * 1e3:9.2f} ms CPU"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save took, in seconds."""

    call: Cost
    copy: Cost
    """A bare one, just before."""
    stall: float
    durable: float
    daemon_cpu: float


class Profile:
    """One state, saved and restored again and again."""

    def __init__(self, state: TrainingState, tries: int, look: str, folder: Path) -> None:
        """``look``: the operation whose last try is shown function by function."""
        self._state = state
        self._replica = Replica(state)
        self._tries = tries
        self._look = look
        self._folder = folder
        self._number = 0
        self._tensors = state.tensors()
        self._bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def run(self) -> None:
        """Prints what it finds."""
        print(f"{self._bytes / 1e6:.0f} MB in {len(self._tensors)} tensors")
        for kind in (Eager, Overlapped):
            folder = self._folder / kind.__name__
            folder.mkdir()
            subject = kind(self._state, folder)
            subject.open()
            try:
                self._saves(subject)
                if kind is Overlapped:
                    self._restores(subject, "memory")
                    self._restores(subject, "disk")
            finally:
                subject.close()

    def _saves(self, subject: Overlapped) -> None:
        before = Memory.now()
        first, *others = [self._save(subject) for _ in range(WARM_UPS + self._tries)]
        steady = others[WARM_UPS - 1 :]
        call, copy = _least([one.call for one in steady]), _least([one.copy for one in steady])
        above = call.cpu - (copy.cpu if isinstance(subject, Eager) else 0)
        daemon_cpu = min(one.daemon_cpu for one in steady)
        _show(f"save() {type(subject).__name__}", call, copy)
        print(f"    {above / len(self._tensors) * 1e6:.2f} µs CPU a tensor; first call {first.call}")
        print(f"    stall {min(one.stall for one in steady) * 1e3:.2f} ms, durable {_durable(steady) * 1e3:.1f} ms")
        print(f"    daemon {daemon_cpu:.3f} CPU s, {daemon_cpu / self._bytes * 1e9:.3f} s/GB")
        print(f"    private memory {(Memory.now().private - before.private) / 2**20:+.0f} MiB")
        if self._look == "save":
            self._save(subject, _shown)

    def _save(self, subject: Overlapped, run: Callable[[Callable[[], None]], None] = lambda call: call()) -> Saved:
        self._number += 1
        self._state.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        subject.stepped(self._number)
        copy = _cost(self._replica.take)
        before, began = Cpu.now(), time.perf_counter()
        handles: list[Handle] = []
        call = _cost(lambda: run(lambda: handles.append(subject.save(self._number))))
        handles[0].wait_copied()
        stall = time.perf_counter() - began
        handles[0].wait_durable()
        durable = time.perf_counter() - began
        time.sleep(SETTLE_SECONDS)
        return Saved(call, copy, stall, durable, Cpu.now().since(before).other_processes)

    def _restores(self, subject: Overlapped, place: str) -> None:
        """Of what was saved last, which the live state still is."""
        self._replica.take()
        probe = self._folder / "probe"
        if place == "disk":
            write_direct(probe, self._replica.memory)
        # ckptd last: after a restore its arena is made.
        everybody: dict[str, Subject] = {**(self._peers() if place == "disk" else {}), "ckptd": subject}
        bare: list[Cost] = []
        costs: dict[str, list[Cost]] = {name: [] for name in everybody}
        for _ in range(self._tries):
            subject.restart(keep_memory=place == "memory")
            bare.append(self._bare(place, probe))
            for name, one in everybody.items():
                costs[name].append(_cost(self._restore(one, place)))
                self._compare(name)
        for name, found in costs.items():
            _show(f"restore, {place}, {name}", _least(found), _least(bare))
        if self._look == place:
            subject.restart(keep_memory=place == "memory")
            _shown(self._restore(subject, place))

    def _bare(self, place: str, probe: Path) -> Cost:
        if place == "memory":
            return _cost(self._replica.take)
        forget_files([probe])
        return _cost(lambda: read_direct(probe, self._replica.memory))

    def _peers(self) -> dict[str, Subject]:
        """With the same state saved."""
        peers: dict[str, Subject] = {}
        for name, kind in {"safetensors": Safetensors, "torch.load": TorchSave}.items():
            folder = self._folder / name
            folder.mkdir()
            peers[name] = kind(self._state, folder)
            peers[name].save(self._number)
            sync_files(files_of(peers[name].stored(self._number)))
        return peers

    def _restore(self, subject: Subject, place: str) -> Callable[[], None]:
        """Of a state that is not there any more, from files that are in no cache."""
        self._state.wipe()
        if place == "disk":
            forget_files(files_of(subject.stored(self._number)))
        return lambda: subject.restore(self._number)

    def _compare(self, name: str) -> None:
        if (differing := self._replica.differing()) is not None:
            raise ValueError(f"{name}: {differing} reads back differently from what was saved")


def _cost(call: Callable[[], object]) -> Cost:
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - began, time.process_time() - cpu)


def _least(costs: list[Cost]) -> Cost:
    return Cost(min(cost.elapsed for cost in costs), min(cost.cpu for cost in costs))


def _durable(saves: list[Saved]) -> float:
    return min(save.durable for save in saves)


def _shown(call: Callable[[], None]) -> None:
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(call)
    pstats.Stats(profile).sort_stats("tottime").print_stats(LINES_SHOWN)


def _show(what: str, ours: Cost, bare: Cost) -> None:
    rate, cpu = bare.elapsed / ours.elapsed, ours.cpu / bare.cpu
    print(f"{what:18s}{ours}; bare {bare}; {rate:.2f} of its rate, {cpu:.2f} times its CPU", flush=True)


def profile(
    state_bytes: Annotated[int, typer.Option("--bytes", parser=size, help="Of the state: 512MB, 1.5GB.")] = 512_000_000,
    tensors: Annotated[int | None, typer.Option(help="Of the state, all equal; else shaped like a GPT.", min=4)] = None,
    tries: Annotated[int, typer.Option(help="Of which the least counts.", min=1)] = 5,
    look: Annotated[str, typer.Option(help="save, memory or disk: show where its processor time goes.")] = "",
    folder: Annotated[Path, typer.Option(help="On the disk to measure.", resolve_path=True)] = Path("build/bench"),
) -> None:
    """What saves and restores cost: elapsed and processor time, beside a bare copy and a bare read."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        Profile(TrainingState(state_bytes, tensors), tries, look, Path(place)).run()


if __name__ == "__main__":
    typer.run(profile)
