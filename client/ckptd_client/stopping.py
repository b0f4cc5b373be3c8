"""Signals that ask a training to stop: noted here, agreed on by appointment, obeyed after one last save.

``ckptd run`` has its workers listen to SIGTERM, SIGUSR1 and SIGUSR2; elsewhere ``Checkpointer(stop_on=…)`` says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

from ckptd.errors import ConfigError, TrainingStopped

STOP_VARIABLE = "CKPTD_STOP_ON"
"""Names of signals, with commas."""
LAUNCHER_VARIABLE = "CKPTD_LAUNCHER"
"""The process without which this one is not to go on."""
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
PR_SET_PDEATHSIG = 1

_log = logging.getLogger("ckptd")


class Stopped(SystemExit):
    """Ends the training after a last save that all ranks have taken: raised by ``Checkpointer.step``. Uncaught, the
    process ends with the exit code 15."""

    def __init__(self, step: int) -> None:
        super().__init__(TrainingStopped.exit_code)
        self.step = step


class Asked:
    """Whether a process was asked to stop. A plain attribute, as a signal handler must not wait for a lock."""

    by: str = ""
    """The signal that it got."""


ASKED = Asked()
"""This one."""


def listen(names: Sequence[str] | None) -> None:
    """Note these signals instead of dying of them; ``None``: those that the launcher names. They stay noted for good.

    Raises :class:`ConfigError` for what is no signal. Only the main thread can listen; elsewhere a warning says so.
    """
    if names is None:
        names = [name for name in os.environ.get(STOP_VARIABLE, "").split(",") if name]
        _end_with_launcher()
    unknown = [name for name in names if name not in signal.Signals.__members__]
    if unknown:
        raise ConfigError(f"stop_on: no signal is called {', '.join(unknown)}", hint="such as SIGTERM or SIGUSR1")
    if names and threading.current_thread() is not threading.main_thread():
        _log.warning("signals cannot be listened to outside the main thread: %s", ", ".join(names))
        return
    for name in names:
        signal.signal(signal.Signals[name], _note)


def _note(number: int, frame: FrameType | None) -> None:
    ASKED.by = signal.Signals(number).name


def _end_with_launcher() -> None:
    """Whoever kills the launcher outright leaves no worker behind that holds the GPU."""
    if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
