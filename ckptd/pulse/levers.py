"""Levers: how a daemon gets the stacks of a process that does nothing any more, and ends it, without knowing it.

A pipe whose read end is set to raise a signal in its owner when something is written into it (``F_SETOWN``,
``F_SETSIG``, ``O_ASYNC``). Whoever has the write end needs neither the process's number nor a permission, and the
process needs no thread, no child, and not its interpreter lock: the kernel sends the signal. One pipe raises a
real-time signal on which :mod:`faulthandler` writes the stacks of all threads into shared memory; the other one
raises SIGKILL; or, in process 1 of a container, which no signal from within can kill, one whose handler is libc's
``_exit``. The kernel binds both to this very process, so a late pull never meets its successor.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import threading

from ckptd.errors import ResourceError

_OURS = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
"""Real-time signals, from the end that is used least."""
_libc = ctypes.CDLL(None)
_lock = threading.Lock()
_shared: list[Levers] = []


class Levers:
    """Of this process; all who :meth:`acquire` them hold the same ones until the last one lets go.

    ``stacks``: a memfd for the daemon to read, ``dump`` and ``end``: where it writes a byte. Descriptors, which stay
    ours. ``signal``: what a dump raises, for processes that were forked from this one and can be signalled.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._pid = os.getpid()
        self._reading: list[int] = []
        self.signal, self._exit_signal = _free_signals(2)
        try:
            self.stacks = os.memfd_create("ckptd-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # So that each process and thread that dumps appends, wherever the others are.
            fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(self.signal, self.stacks, all_threads=True)
            self.dump = self._lever(self.signal)
            self.end = self._lever(self._exit_signal if self._pid == 1 else signal.SIGKILL)
            if self._pid == 1:
                _handle_in_c(self._exit_signal, ctypes.cast(_libc._exit, ctypes.c_void_p))
        except OSError as error:
            raise ResourceError(f"cannot make levers for the watchdog: {error.strerror}") from None

    def _lever(self, number: int) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._reading.append(reading)
        fcntl.fcntl(reading, fcntl.F_SETOWN, self._pid)
        fcntl.fcntl(reading, fcntl.F_SETSIG, number)
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        return writing

    @classmethod
    def acquire(cls) -> Levers:
        """Raises :class:`ResourceError` where there is no signal or descriptor left."""
        with _lock:
            if not _shared:
                _shared.append(cls())
            _shared[0]._holders += 1
            return _shared[0]

    def release(self) -> None:
        """Once for each :meth:`acquire`; never in a forked child, whose levers are its parent's."""
        with _lock:
            self._holders -= 1
            if self._holders == 0:
                _shared.remove(self)
                self._close()

    def _close(self) -> None:
        # The pipes first: a signal that nobody takes any more would end the process.
        for fd in self._reading:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
            os.close(fd)
        faulthandler.unregister(self.signal)
        if self._pid == 1:
            _handle_in_c(self._exit_signal, ctypes.c_void_p(None))
        for fd in (self.dump, self.end, self.stacks):
            os.close(fd)


def _free_signals(count: int) -> list[int]:
    free = [number for number in _OURS if signal.getsignal(number) is signal.SIG_DFL]
    if len(free) < count:
        raise ResourceError("no real-time signal is free for the stacks of this process")
    return free[:count]


def _handle_in_c(number: int, function: ctypes.c_void_p) -> None:
    """Have a C function handle a signal: it needs no interpreter lock. NULL: as by default."""
    _libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    _libc.signal(number, function)
