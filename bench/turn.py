"""One turn: one subject, in this process. ``python -m bench.turn NAME SETTINGS FOLDER RESULT``.

Runs in any interpreter that has torch, psutil and the subject's own library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import subjects
from bench.disk import read_direct, write_direct
from bench.loop import Loop
from bench.probes import Memory, MemoryPeak, await_quiet, file_system, forget_files, machine, sync_files
from bench.settings import ATTEMPTS, FOREIGN_CORES_MAX, Settings
from bench.state import Replica, TrainingState
from bench.subject import files_of

PROBES = 2
"""Bare writes in each turn."""


@dataclass(slots=True)
class Turn:
    """What a turn measured. Seconds and bytes."""

    software: dict[str, Any]
    machine: dict[str, Any]
    state_bytes: int
    tensors: int
    first: dict[str, float] = field(default_factory=dict[str, float])
    saves: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    direct_write: list[float] = field(default_factory=list[float])
    direct_read: list[float] = field(default_factory=list[float])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    """More than before the subject was there: held between saves, and at the peak of one."""
    stored_bytes: int = 0
    restore: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    forgotten_by: str = ""


class Bench:
    """Runs one subject through one turn."""

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._probe = folder / "probe"
        factory = subjects.load(name)
        self._state = TrainingState(settings.state_bytes, settings.tensors, settings.dtype)
        self._loop = Loop(self._state, settings.step_seconds, settings.window_steps)
        self._replica = Replica(self._state)
        self._copy_seconds()  # warm from here on
        (folder / "subject").mkdir()
        self._subject = factory(self._state, folder / "subject")
        tensors = self._state.tensors()
        self._turn = Turn(
            software=asdict(self._subject.promises) | {"torch": torch.__version__, "python": sys.version.split()[0]},
            machine=machine() | {"file_system": file_system(folder)},
            state_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            tensors=len(tensors),
        )

    def run(self) -> Turn:
        """Raises whatever goes wrong; a checkpoint that reads back differently does."""
        await_quiet(FOREIGN_CORES_MAX, self._settings.patience_seconds)
        before = Memory.now()
        self._subject.open()
        try:
            # As in a training run, the first save comes some steps after the start.
            self._loop.undisturbed(self._subject)
            self._save_and_measure()
            number = self._save_and_watch_memory(before)
            self._probe_writes()
            self._restore(number)
        finally:
            self._subject.close()
        return self._turn

    # Saving

    def _save_and_measure(self) -> None:
        """The first save, the warm-up, and then as many as it takes."""
        settings = self._settings
        before = self._loop.undisturbed(self._subject)
        self._turn.first, before = self._measured(before)
        for _ in range(settings.warm_ups):
            _, before = self._measured(before)
        saves = self._turn.saves
        while sum(save["foreign_cores"] <= FOREIGN_CORES_MAX for save in saves) < settings.saves:
            if len(saves) >= settings.saves * ATTEMPTS:
                break
            sample, before = self._measured(before)
            saves.append(sample)

    def _measured(self, before: float) -> tuple[dict[str, float], float]:
        """One save, between two windows without; takes what a step took in the window before, returns the one after."""
        memcpy = self._copy_seconds()
        window = self._loop.with_save(self._subject)
        number = self._loop.number - window.steps
        self._turn.stored_bytes = sum(file.stat().st_size for file in files_of(self._subject.stored(number)))
        self._subject.discard(number)
        after = self._loop.undisturbed(self._subject)
        undisturbed = (before + after) / 2
        lost = window.total - window.steps * undisturbed
        return {"memcpy": memcpy, "undisturbed_step": undisturbed, "lost": lost, **asdict(window)}, after

    def _copy_seconds(self) -> float:
        return _seconds(self._replica.take)

    def _probe_writes(self) -> None:
        """Write what the replica holds, as bare as can be; the file stays for reading."""
        for _ in range(PROBES):
            self._probe.unlink(missing_ok=True)
            self._turn.direct_write.append(_seconds(lambda: write_direct(self._probe, self._replica.memory)))

    def _probe_reads(self) -> None:
        """Read it back, to where it came from."""
        self._turn.direct_read.append(_seconds(lambda: read_direct(self._probe, self._replica.memory)))

    def _save_and_watch_memory(self, before: Memory) -> int:
        """One more save, not timed, whose state the replica keeps. Returns its step."""
        idle = Memory.now()
        self._replica.take()
        number = self._loop.number
        with MemoryPeak() as watch:
            self._loop.with_save(self._subject)
        self._turn.memory = {
            "idle_private": idle.private - before.private,
            "idle_shared": idle.shared - before.shared,
            "peak_private": watch.peak.private - before.private,
            "peak_shared": watch.peak.shared - before.shared,
        }
        return number

    # Restoring

    def _restore(self, number: int) -> None:
        files = list(files_of(self._subject.stored(number)))
        sync_files(files)
        if self._subject.restores_from_memory:
            self._subject.restart(keep_memory=True)
            self._restore_once("memory", number)
        for _ in range(self._settings.restores):
            self._subject.restart(keep_memory=False)
            self._turn.forgotten_by = forget_files(files)
            self._probe_reads()
            self._restore_once("cold", number)
        for _ in range(self._settings.restores):
            self._subject.restart(keep_memory=False)
            for file in files:
                file.read_bytes()
            self._restore_once("warm", number)

    def _restore_once(self, kind: str, number: int) -> None:
        self._state.wipe()
        seconds = _seconds(lambda: self._subject.restore(number))
        differing = self._replica.differing()
        if differing is not None:
            raise ValueError(f"{differing} reads back differently from what was saved ({kind})")
        self._turn.restore.setdefault(kind, []).append(seconds)


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(name: str, settings: str, folder: str, result: str) -> None:
    """Run a turn on one thread and write its result as JSON."""
    torch.set_num_threads(1)
    turn = Bench(name, Settings(**json.loads(settings)), Path(folder)).run()
    Path(result).write_text(json.dumps(asdict(turn)))


if __name__ == "__main__":
    main(*sys.argv[1:])
