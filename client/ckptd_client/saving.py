"""Saves that were asked for: taken at once, put off to the next boundary, or given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from ckptd.errors import DeadlineExceeded, SaveError, SaveSkipped, StateError, first_line
from ckptd.format.keys import Version
from ckptd.pulse.page import Phase
from ckptd.wire.messages import Skip
from ckptd_client.generation import Life
from ckptd_client.handles import Handles
from ckptd_client.link import DaemonLink
from ckptd_client.save import Save, as_save_error
from ckptd_client.snapshots import Snapshots
from ckptd_client.spacing import Spacing

OnFull = Literal["wait", "skip", "fail"]
OnError = Literal["log", "raise"]

_log = logging.getLogger("ckptd")


class Saving:
    """The saves of one rank. Belongs to the training thread, but for :meth:`missed`."""

    def __init__(
        self,
        snapshots: Snapshots,
        handles: Handles,
        link: DaemonLink,
        rank: int,
        world: int,
        *,
        on_full: OnFull,
        max_wait: float,
    ) -> None:
        self.life: Life | None = None
        """In which it saves, once that is open."""
        self._snapshots = snapshots
        self._handles = handles
        self._link = link
        self._rank = rank
        self._on_full: OnFull = on_full
        self._wait_seconds = max_wait if on_full == "wait" else 0.0
        self._spacing = Spacing() if world > 1 and on_full != "wait" else None
        self._boundary_step: int | None = None
        self._deferred: list[tuple[Save, Mapping[str, float | None]]] = []

    @property
    def any_deferred(self) -> bool:
        """A save waits for the next boundary."""
        return bool(self._deferred)

    def stepped(self, step: int) -> None:
        """A training step was reported. Where a boundary was crossed, what was put off to it is saved."""
        if self._snapshots.boundary.crossed():
            self._boundary_step = step
            self._snapshots.boundary_passed()
            deferred, self._deferred = self._deferred, []
            for save, metrics in deferred:
                self._save_now(save, step, metrics)

    def request(
        self, step: int, reason: str, metrics: Mapping[str, float | None], *, last: bool = False, **kinds: bool
    ) -> Save:
        """Save a step in the open life, now or at the next boundary. ``last``: the training stops here. ``kinds``: of
        :class:`Save`. A save of the step that is known is returned instead."""
        assert self.life is not None
        version = Version(step, self.life.generation)
        known = self._handles.get(version)
        if known is not None:
            return known
        save = Save(version, reason, **kinds)
        self._handles.add(save)
        if self._spacing is not None and not self._spacing.tries(step) and not (last or any(kinds.values())):
            self._give_up(save, self._full(f"the store is behind: one save of {self._spacing.stride} is tried"))
            return save
        if step == self._boundary_step or self._snapshots.boundary.crossed():
            self._save_now(save, step, metrics)
        else:
            save.defer()
            self._deferred.append((save, metrics))
        return save

    def _save_now(self, save: Save, step: int, metrics: Mapping[str, float | None]) -> None:
        assert self.life is not None
        save.begin(step)
        self._handles.add(save)
        try:
            with self._link.pulse.phase(Phase.SAVE):
                self._snapshots.take(save, self.life, metrics, wait_seconds=self._wait_seconds)
            self._tried(found_slot=True)
        except DeadlineExceeded as error:
            self._tried(found_slot=False)
            self._give_up(save, self._full(first_line(error)))
        except BaseException as error:
            self._give_up(save, error)
            if not isinstance(error, Exception):  # Ctrl-C; any other failure of a save is no reason to end the training
                raise

    def _tried(self, *, found_slot: bool) -> None:
        if self._spacing is not None:
            self._spacing.tried(found_slot=found_slot)

    def _full(self, reason: str) -> SaveError:
        """No slot is free."""
        return SaveError(reason) if self._on_full == "fail" else SaveSkipped(reason)

    def give_up_deferred(self) -> None:
        """At the end: no boundary comes any more."""
        deferred, self._deferred = self._deferred, []
        for save, _ in deferred:
            self._give_up(save, SaveSkipped(f"no boundary came after step {save.step} was asked for"))

    def _give_up(self, save: Save, error: BaseException) -> None:
        """The step is not saved by this rank; the others are told, and let go."""
        save.fail(error if isinstance(error, StateError) else as_save_error(error))
        self._handles.report(save)
        self._tell_skip(save.step, first_line(error))

    def _tell_skip(self, step: int, reason: str) -> None:
        if (life := self.life) is not None:
            self._link.tell(Skip(step=step, generation=life.generation, run=life.run, reason=reason[:1000]))

    def missed(self, step: int) -> None:
        """On the appointments' thread: the others save a step that this rank has passed."""
        self._tell_skip(step, f"rank {self._rank} heard of the appointment after it had passed step {step}")

    def report_failures(self, on_error: OnError) -> None:
        """Log the saves that failed since this was called last; with ``"raise"``, raise the error of the first one."""
        for save in self._handles.take_unreported():
            _log.error("the save of step %d failed: %s", save.step, save.error)
            if on_error == "raise" and save.error is not None:
                raise save.error
