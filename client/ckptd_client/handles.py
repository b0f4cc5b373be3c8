"""The handles of recent saves, moved on by what the daemon tells."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ckptd.errors import CkptdError
from ckptd.format.keys import Version
from ckptd.wire import messages
from ckptd.wire.messages import Committed, Durable
from ckptd_client.link import Event
from ckptd_client.save import Save, as_save_error

HANDLES_KEPT = 64
"""So many are remembered, so that a repeated save of a step returns the first one's."""


class Handles:
    """Thread-safe: the training thread adds, the link's thread moves on. ``slot_freed`` is called when a slot may have
    become reusable."""

    def __init__(self, slot_freed: Callable[[], None]) -> None:
        self._slot_freed = slot_freed
        self._lock = threading.Lock()
        self._saves: OrderedDict[Version, Save] = OrderedDict()
        self.failed: list[Save] = []
        """Nobody has heard of them yet."""

    def add(self, save: Save) -> None:
        """Remember a save under its version."""
        with self._lock:
            self._saves[save.version] = save
            if len(self._saves) > HANDLES_KEPT:  # of those in flight there are few, and they are still to be moved on
                oldest = next((version for version, known in self._saves.items() if known.done), None)
                if oldest is not None:
                    del self._saves[oldest]

    def get(self, version: Version) -> Save | None:
        """The save of a version, where it is remembered."""
        with self._lock:
            return self._saves.get(version)

    def unfinished(self) -> list[Save]:
        """Neither committed nor failed yet, oldest first."""
        with self._lock:
            return [save for save in self._saves.values() if not save.done]

    def newest(self) -> Save | None:
        """The one that was added last."""
        with self._lock:
            return next(reversed(self._saves.values()), None)

    def report(self, save: Save) -> None:
        """A save has failed, and nobody has heard of it yet."""
        with self._lock:
            self.failed.append(save)

    def take_unreported(self) -> list[Save]:
        """Saves that failed since this was asked last."""
        with self._lock:
            failed, self.failed = self.failed, []
        return failed

    def on_event(self, event: Event) -> None:
        """What the daemon tells, on the link's thread."""
        if isinstance(event, Durable):
            self._on_durable(event)
            return
        save = self.get(Version(event.step, event.generation))
        if save is None:
            return
        if isinstance(event, Committed):
            save.stats.commit_seconds = float(event.stats.get("commit_seconds", 0.0))
            save.advance("committed")
            return
        save.fail(as_save_error(messages.as_error(event)))
        self.report(save)
        self._slot_freed()

    def on_refused(self, error: CkptdError) -> None:
        """A daemon does not take this trainer back: nothing of it will be written any more. On a thread of the link."""
        for save in self.unfinished():
            save.fail(as_save_error(error))
            self.report(save)

    def _on_durable(self, event: Durable) -> None:
        with self._lock:
            save = next((save for save in self._saves.values() if save.ref == event.at), None)
        if save is not None:
            save.stats.queue_seconds = float(event.stats.get("queue_seconds", 0.0))
            save.stats.write_seconds = float(event.stats.get("write_seconds", 0.0))
            save.stats.path = str(event.stats.get("path", ""))
            save.advance("durable")
        self._slot_freed()


def await_ends(saves: Sequence[Save], timeout: float | None) -> Save | None:
    """Wait until each is committed or has failed; returns the first that has failed. ``timeout`` in seconds for all of
    them; raises :class:`DeadlineExceeded`."""
    stop = None if timeout is None else time.monotonic() + timeout
    for save in saves:
        save.wait_for_end(None if stop is None else max(stop - time.monotonic(), 0.0))
    return next((save for save in saves if save.error is not None), None)
