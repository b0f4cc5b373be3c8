"""The training loop that all subjects share, and the windows of it that are timed.

A step is many small matrix products, as a framework launches many small operations, and then AdamW over the whole
state. It runs on one thread. The products do not use the state: what they stand for is time in which a trainer needs
the interpreter's lock every half millisecond.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.probes import Cpu, sync_files
from bench.state import TrainingState
from bench.subject import Handle, Subject, files_of

DURABLE_SECONDS = 300.0
"""A save that takes longer has failed."""
_WIDTH = 256


@dataclass(slots=True)
class SaveWindow:
    """Steps from the call to a save until it was durable. Seconds throughout."""

    call: float
    """What the call took."""
    fence: float
    """What the training waited before the next optimizer step."""
    durable: float
    """From the call; what the subject does not sync, the harness does."""
    total: float
    """From the call to the end of the last step."""
    steps: int
    call_cpu: float
    own_threads_cpu: float
    other_processes_cpu: float
    foreign_cores: float


class Loop:
    """Steps of training with a subject beside them."""

    def __init__(self, state: TrainingState, step_seconds: float, window_steps: int) -> None:
        """``step_seconds``: how long the products of one step take, about."""
        self._state = state
        self._window_steps = window_steps
        self._left = torch.randn(_WIDTH, _WIDTH)
        self._right = torch.randn(_WIDTH, _WIDTH)
        self._product = torch.empty(_WIDTH, _WIDTH)
        self.products = max(1, round(step_seconds / self._product_seconds()))
        self.number = 0

    def _product_seconds(self) -> float:
        times: list[float] = []
        for _ in range(20):
            began = time.perf_counter()
            self._compute(20)
            times.append((time.perf_counter() - began) / 20)
        return sorted(times)[len(times) // 2]

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._left, self._right, out=self._product)

    def step(self, subject: Subject, before_optimizer: Callable[[], None] | None = None) -> None:
        """One training step."""
        self._compute(self.products)
        if before_optimizer is not None:
            before_optimizer()
        self._state.step()
        self.number += 1
        subject.stepped(self.number)

    def undisturbed(self, subject: Subject) -> float:
        """A window without a save; returns the seconds that a step took."""
        began = time.perf_counter()
        for _ in range(self._window_steps):
            self.step(subject)
        return (time.perf_counter() - began) / self._window_steps

    def with_save(self, subject: Subject) -> SaveWindow:
        """Save now, and train until it is durable, and for a window at least. Raises what the save ends with."""
        number = self.number
        cpu = Cpu.now()
        began = time.perf_counter()
        thread_began = time.thread_time()
        handle = subject.save(number)
        call = time.perf_counter() - began
        call_cpu = time.thread_time() - thread_began
        waiter = _Waiter(subject, handle, number)
        fence = 0.0

        def wait_copied() -> None:
            nonlocal fence
            before = time.perf_counter()
            handle.wait_copied()
            fence = time.perf_counter() - before

        self.step(subject, wait_copied)
        steps = 1
        while steps < self._window_steps or not waiter.done:
            if time.perf_counter() - began > DURABLE_SECONDS:
                raise TimeoutError(f"not durable after {DURABLE_SECONDS:g} s")
            self.step(subject)
            steps += 1
        total = time.perf_counter() - began
        used = Cpu.now().since(cpu)
        return SaveWindow(
            call=call,
            fence=fence,
            durable=waiter.finished() - began,
            total=total,
            steps=steps,
            call_cpu=call_cpu,
            own_threads_cpu=used.own_threads,
            other_processes_cpu=used.other_processes,
            foreign_cores=used.foreign_cores(total),
        )


class _Waiter:
    """Waits for a save on a thread of its own, and syncs what the subject has not."""

    def __init__(self, subject: Subject, handle: Handle, number: int) -> None:
        self._subject = subject
        self._handle = handle
        self._number = number
        self._at = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, name="bench-durable", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._handle.wait_durable()
            if not self._subject.promises.fsync:
                sync_files(files_of(self._subject.stored(self._number)))
            self._at = time.perf_counter()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finished(self) -> float:
        """When it became durable, on the clock of ``time.perf_counter``."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._at
