"""Retention in the background: after a commit, and where room is needed; one pass at a time for each run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ckptd.checkpoint.retention import Keep, apply
from ckptd.checkpoint.run import Run
from ckptd.errors import Superseded, first_line
from ckptd.storage import Backend

log = logging.getLogger(__name__)


class Retiring:
    """What fails is logged and counted, and tried again after the next commit or full store. It never fails a save."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self.deleted = 0
        """Checkpoints, since the start."""
        self.failed = 0
        self._spawn = spawn
        self._wanted: dict[str, tuple[Backend, str, Keep, int]] = {}
        """URL → the pass to be made next."""
        self.running: dict[str, Backend] = {}

    def soon(self, backend: Backend, run_id: str, keep: Keep, generation: int) -> None:
        """Make a pass soon; several requests during one pass make one more."""
        self._wanted[backend.url] = (backend, run_id, keep, generation)
        if backend.url not in self.running:
            self.running[backend.url] = backend
            self._spawn(self._run(backend.url), f"retention at {backend.url}")

    async def _run(self, url: str) -> None:
        try:
            while url in self._wanted:
                backend, run_id, keep, generation = self._wanted.pop(url)
                self.running[url] = backend
                await self._pass(Run(backend, run_id), keep, generation)
        finally:
            del self.running[url]

    async def _pass(self, run: Run, keep: Keep, generation: int) -> None:
        try:
            outcome = await apply(run, keep, generation=generation)
        except Superseded as error:
            log.info("%s", error)
        except Exception as error:
            self.failed += 1
            log.warning("retention at %s: %s", run.backend.url, first_line(error))
        else:
            self.deleted += len(outcome.deleted)
            self.failed += len(outcome.failed)
            for version, reason in {**outcome.failed, **outcome.waiting}.items():
                log.warning("retention at %s: %s stays for now: %s", run.backend.url, version, reason)
