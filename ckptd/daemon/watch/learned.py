"""What a daemon has learned of its runs, kept in its state folder, so that a restart does not begin anew."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec

from ckptd.daemon.watch.durations import Durations
from ckptd.errors import first_line
from ckptd.format.digests import hex_digest
from ckptd.limits import LEARNED_RUNS_KEPT
from ckptd.pulse.page import Phase

log = logging.getLogger(__name__)

KEEP_SECONDS = 30.0
"""How often it is written, at most."""
LEARNS = frozenset({Phase.STEP, Phase.SAVE, Phase.RESTORE, Phase.EVAL, Phase.COMPILE, Phase.OTHER})


class _Stored(msgspec.Struct, kw_only=True):
    run: str
    phases: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]


class Learned:
    """Durations by run and phase. Reading and writing block, for a few kilobytes; what cannot be read or written is
    logged, and learned anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, dict[Phase, Durations]] = {}
        self._changed: set[str] = set()
        self._kept_seconds = float("-inf")

    def of(self, run: str) -> dict[Phase, Durations]:
        """By phase; what is not in it is not known."""
        if run not in self._runs:
            self._runs[run] = self._read(run)
        return self._runs[run]

    @property
    def runs(self) -> dict[str, dict[Phase, Durations]]:
        """All that were asked for."""
        return self._runs

    def add(self, run: str, phase: Phase, seconds: float) -> None:
        """One stay in a phase is over."""
        if phase in LEARNS:
            self.of(run).setdefault(phase, Durations()).add(seconds)
            self._changed.add(run)

    def keep(self, now_seconds: float, *, at_once: bool = False) -> None:
        """Write what has changed, every :data:`KEEP_SECONDS` at most."""
        if not self._changed or not (at_once or now_seconds - self._kept_seconds >= KEEP_SECONDS):
            return
        self._kept_seconds = now_seconds
        changed, self._changed = self._changed, set()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for run in changed:
                self._write(run)
            files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in files[:-LEARNED_RUNS_KEPT]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("what was learned is not kept: %s", first_line(error))

    def _path(self, run: str) -> Path:
        return self._folder / f"{hex_digest(run.encode())}.json"

    def _write(self, run: str) -> None:
        phases = {phase.name.lower(): durations.stored() for phase, durations in self._runs[run].items()}
        path = self._path(run)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(_Stored(run=run, phases=phases)))
        os.replace(fresh, path)

    def _read(self, run: str) -> dict[Phase, Durations]:
        try:
            stored = msgspec.json.decode(self._path(run).read_bytes(), type=_Stored)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("limits of %s are learned anew: %s", run, first_line(error))
            return {}
        known = {phase.name.lower(): phase for phase in LEARNS}
        return {known[name]: Durations(counts) for name, counts in stored.phases.items() if name in known}
