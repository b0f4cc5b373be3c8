"""The training logs of one daemon: taken out of its trainers' memory, judged, and stored at every tier of their run."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ckptd.daemon.log_writing import LogWriter, Waiting
from ckptd.daemon.owner import Owner
from ckptd.errors import ProtocolError, first_line
from ckptd.format.keys import Version
from ckptd.limits import COMMIT_SECONDS, LOG_READ_SECONDS, LOG_WAITING_ROWS_MAX
from ckptd.pulse.rows import MappedRows, Row

log = logging.getLogger(__name__)

TEXT_MAX = 300


class LoggedLife:
    """One life of a trainer, as far as its rows go."""

    def __init__(self, owner: Owner, rows: MappedRows) -> None:
        self.owner = owner
        self.generation = 0
        self.read = 0
        """The number up to which rows were read, or lost."""
        self.refused = 0
        """Columns that there was no room for."""
        self.over_seconds: float | None = None
        """Since when nothing more can come of it."""
        self.waiting = Waiting(LOG_WAITING_ROWS_MAX)
        self._rows: MappedRows | None = rows
        self.writers = [LogWriter(tier.backend, owner.seat.rank, rows.life, self.waiting) for tier in owner.tiers]

    def take(self) -> list[Row]:
        """What has come since the last time."""
        if self._rows is None:
            return []
        found = self._rows.since(self.read)
        self.generation, self.refused = self._rows.generation, self._rows.refused
        if found:
            self.read = found[-1].number
            self.waiting.add(found)
        return found

    def close(self) -> None:
        """Nothing more comes. Idempotent."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
            self.over_seconds = time.monotonic()

    @property
    def stored(self) -> bool:
        """There is nothing left to do."""
        return not self.generation or not any(writer.behind or writer.writing for writer in self.writers)


class TrainingLogs:
    """All that is logged here. Storing a log never fails a save, nor does anything else wait for it."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        committed: Callable[[str], Version | None],
        judge: Callable[[Owner, int, Sequence[Row]], None],
        write_seconds: float,
    ) -> None:
        """``committed``: a run's URL → what was committed there last: a reason to store. ``judge`` hears of all rows,
        with owner and generation. ``write_seconds``: how long rows wait at most."""
        self._spawn = spawn
        self._committed = committed
        self._judge = judge
        self._write_seconds = write_seconds
        self._lives: dict[Owner, LoggedLife] = {}
        self._ending: list[LoggedLife] = []
        """Of trainers that have left."""
        self._known: dict[str, Version | None] = {}

    # Trainers

    def take(self, owner: Owner, fd: int) -> None:
        """A trainer hands in its rows. Takes over ``fd``. Raises :class:`ProtocolError`."""
        try:
            rows = MappedRows(fd, writable=False)
        except Exception as error:
            raise ProtocolError(f"handed in as rows: {first_line(error)}") from None
        finally:
            os.close(fd)
        self.left(owner)
        self._lives[owner] = LoggedLife(owner, rows)

    def left(self, owner: Owner) -> None:
        """Its session is over. What it has written by now is stored."""
        if (life := self._lives.pop(owner, None)) is not None:
            self._read(life)
            life.close()
            self._ending.append(life)
            self._write(life)

    # Working

    async def run(self) -> None:
        """Read and store again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOG_READ_SECONDS)
            try:
                self._look()
            except Exception:
                log.exception("the training log could not be read")

    def _look(self) -> None:
        now = time.monotonic()
        news = self._news()
        for life in list(self._lives.values()):
            self._read(life)
            if life.owner.seat.url in news:
                self._write(life)
        for life in [*self._lives.values(), *self._ending]:
            for writer in life.writers:
                if now - writer.tried_seconds >= self._write_seconds:
                    self._write_at(life, writer)
        self._ending = [life for life in self._ending if not self._is_done(life)]

    def _news(self) -> set[str]:
        """Runs that have a new commit."""
        urls = {owner.seat.url for owner in self._lives}
        before, self._known = self._known, {url: self._committed(url) for url in urls}
        return {url for url, version in self._known.items() if version != before.get(url)}

    def _read(self, life: LoggedLife) -> None:
        if rows := life.take():
            self._judge(life.owner, life.generation, rows)
        life.waiting.forget(min(writer.needed for writer in life.writers))

    def _write(self, life: LoggedLife) -> None:
        for writer in life.writers:
            self._write_at(life, writer)

    def _write_at(self, life: LoggedLife, writer: LogWriter) -> None:
        # Before there is a generation, nobody could find it again.
        if life.generation and writer.behind and not writer.writing:
            writer.task = self._spawn(writer.write(life.generation), f"training log at {writer.backend.url}")

    def _is_done(self, life: LoggedLife) -> bool:
        assert life.over_seconds is not None
        if not life.stored and time.monotonic() - life.over_seconds < COMMIT_SECONDS:
            return False
        for writer in life.writers:
            left = life.waiting.newest - writer.stored
            if left and not life.generation:
                log.warning("%s ended without a restore or a save: its %d steps have no log", life.owner, left)
            elif left:
                log.error("%s: the log of %d steps is lost: %s", writer.backend.url, left, writer.error)
        return True

    # Ending

    @property
    def busy(self) -> bool:
        """Something is being stored of trainers that have left."""
        return bool(self._ending)

    def busy_owners(self) -> set[Owner]:
        """Whose stores are in use."""
        return {life.owner for life in self._ending}

    async def flush(self, seconds: float) -> list[str]:
        """Store all that there is now. Returns the roots where that was not done after so many seconds."""
        lives = [*self._lives.values(), *self._ending]
        for life in lives:
            self._read(life)
            self._write(life)
        if writing := [writer.task for life in lives for writer in life.writers if writer.task is not None]:
            await asyncio.wait(writing, timeout=seconds)
        return [writer.backend.url for life in lives if life.generation for writer in life.writers if writer.behind]

    def close(self) -> None:
        """Give all memory back."""
        for life in self._lives.values():
            life.close()
        self._lives.clear()

    def status(self) -> list[dict[str, Any]]:
        """For ``ckptd status``."""
        return [
            {
                "run": life.owner.seat.url[:TEXT_MAX],
                "rank": life.owner.seat.rank,
                "generation": life.generation,
                "rows": life.read,
                "columns_refused": life.refused,
                "tiers": [
                    {
                        "tier": writer.backend.url[:TEXT_MAX],
                        "stored": writer.stored,
                        "lost": writer.lost,
                        "failures": writer.failures,
                        "error": writer.error[:TEXT_MAX],
                    }
                    for writer in life.writers
                ],
            }
            for life in [*self._lives.values(), *self._ending]
        ]
