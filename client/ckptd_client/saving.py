"""Saves that were asked for: taken at once, put off to the next boundary, or given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
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

DUE = "due"
"""The reason of a save that the schedule asks for."""

_log = logging.getLogger("ckptd")


@dataclass(slots=True)
class _Asked:
    """A save, and what its snapshot is taken with."""

    save: Save
    metrics: Mapping[str, float | None]
    last: bool
    """The training stops with it."""

    def join(self, metrics: Mapping[str, float | None], *, last: bool, pin: bool = False, debug: bool = False) -> None:
        """It is asked for again, before it was taken."""
        self.metrics = metrics or self.metrics
        self.last = self.last or last
        self.save.pin = self.save.pin or pin
        self.save.debug = self.save.debug and debug


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
        self._max_wait_seconds = max_wait
        self._spacing = Spacing() if world > 1 else None
        self._boundary_step: int | None = None
        self._deferred: _Asked | None = None

    @property
    def any_deferred(self) -> bool:
        """A save waits for the next boundary."""
        return self._deferred is not None

    def stepped(self, step: int, *, last: bool = False) -> None:
        """A training step was reported. Where a boundary was crossed, what was put off to it is saved. ``last``: the
        training stops here, so there is time to wait for a slot."""
        if self._snapshots.boundary.crossed():
            self._boundary_step = step
            self._snapshots.boundary_passed()
            deferred, self._deferred = self._deferred, None
            if deferred is not None:
                deferred.last = deferred.last or last
                self._save_now(deferred, step)

    def request(
        self, step: int, reason: str, metrics: Mapping[str, float | None], *, last: bool = False, **kinds: bool
    ) -> Save:
        """Save a step in the open life, now or at the next boundary. ``last``: the training stops here, so there is
        time to wait for a slot. ``kinds``: of :class:`Save`. A save of the step that is known is returned instead, and
        so is one that waits for the same boundary, as both would be of the same state."""
        assert self.life is not None
        version = Version(step, self.life.generation)
        known = self._handles.get(version)
        if known is not None:
            for kind in (name for name, wanted in kinds.items() if wanted and not getattr(known, name)):
                _log.warning("step %d was asked for before without %s=True, and stays so: %s", step, kind, known)
            return known
        asked, self._deferred = self._deferred, None
        if asked is not None:
            asked.join(metrics, last=last, **kinds)
        else:
            asked = _Asked(Save(version, reason, **kinds), metrics, last)
            self._handles.add(asked.save)
            # Who says "wait" and asks for a save, at the end of the training perhaps, is to have it.
            wanted = last or any(kinds.values()) or (self._on_full == "wait" and reason != DUE)
            if not wanted and (behind := self._left_out(step)):
                # Of what was tried, each failure is told; what is not even tried is no news.
                self._give_up(asked.save, self._full(behind), told=self._on_full == "fail")
                return asked.save
        if step == self._boundary_step or self._snapshots.boundary.crossed():
            self._save_now(asked, step)
        else:
            asked.save.defer()
            self._deferred = asked
        return asked.save

    def _save_now(self, asked: _Asked, step: int) -> None:
        assert self.life is not None
        save = asked.save
        save.begin(step)
        self._handles.add(save)
        wait_seconds = self._max_wait_seconds if self._on_full == "wait" or asked.last else 0.0
        try:
            with self._link.pulse.phase(Phase.SAVE):
                self._snapshots.take(save, self.life, asked.metrics, wait_seconds=wait_seconds)
            self._tried(found_slot=True)
        except DeadlineExceeded as error:
            self._tried(found_slot=False)
            self._give_up(save, self._full(first_line(error)))
        except BaseException as error:
            self._give_up(save, error)
            if not isinstance(error, Exception):  # Ctrl-C; any other failure of a save is no reason to end the training
                raise

    def _left_out(self, step: int) -> str | None:
        """Why this is not one of the steps that all ranks try, if it is not."""
        if self._spacing is None or self._spacing.tries(step, idle=self._snapshots.idle):
            return None
        return f"the store is behind: of {self._spacing.width} steps only the first save is tried"

    def _tried(self, *, found_slot: bool) -> None:
        if self._spacing is not None:
            self._spacing.tried(found_slot=found_slot)

    def _full(self, reason: str) -> SaveError:
        """No slot is free."""
        kind = SaveError if self._on_full == "fail" else SaveSkipped
        return kind(reason, hint="save less often, or with pin=True what must not be left out")

    def give_up_deferred(self) -> None:
        """At the end: no boundary comes any more."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            step = deferred.save.step
            self._give_up(deferred.save, SaveSkipped(f"no boundary came after step {step} was asked for"))

    def _give_up(self, save: Save, error: BaseException, *, told: bool = True) -> None:
        """The step is not saved by this rank; the others are told, and let go. ``told``: by the log too."""
        save.fail(error if isinstance(error, StateError) else as_save_error(error))
        if told:
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
