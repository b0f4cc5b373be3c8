"""Whatever is saved, given up, found bad, gone back to, pruned and killed: a good checkpoint stays, if there was one.

A pass of retention is killed at any of its writes, before or after it took effect, and the next one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ckptd.checkpoint import survey
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verdicts import record_verdict
from ckptd.checkpoint.verify import verify
from ckptd.format.keys import TOMBSTONES, Version, checkpoint_prefix
from ckptd.storage import open_backend
from tests.checkpoint.builder import (
    State,
    commit,
    flip,
    keys_of,
    make_checkpoint,
    only_key,
    open_generation,
    retire,
    tamper,
    tensor,
    write_rank,
)
from tests.checkpoint.mortal import Killed, Mortal

STATE = State([tensor("w", (3,))])
T = TypeVar("T")


keeps = st.builds(
    Keep,
    last=st.integers(1, 3),
    every_steps=st.none() | st.integers(2, 9),
    best=st.none() | st.just(("loss", "min", 1)),
    beside_seconds=st.sampled_from([0.0, 1e6]),
)


class Retention(RuleBasedStateMachine):
    """A run, in memory, and what is known to be good of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        backend = open_backend(f"memory://{uuid.uuid4().hex}")
        self.run = self.do(Run.open(backend, create=True))
        self.generation = self.do(open_generation(self.run))
        self.step = 0
        self.parent: Version | None = None
        self.sound: set[Version] = set()
        """Committed, with bytes that are what they were and values that are of use."""
        self.good_once = self.verified_once = False
        self.rotten = 0
        """Bad, and nobody knows."""
        self.unfinished: list[tuple[Version, bytes]] = []

    def teardown(self) -> None:
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    def line(self) -> list[Version]:
        return self.do(self.run.line())

    def known(self, version: Version) -> Any:
        return self.do(self.run.standings()).get(version)

    # What a training does

    @rule(healthy=st.booleans(), loss=st.none() | st.floats(0, 1), steps=st.integers(1, 4))
    def save(self, healthy: bool, loss: float | None, steps: int) -> None:
        self.step += steps
        version = Version(self.step, self.generation)
        if not healthy:
            self.do(self.run.add_mark(version, "unhealthy", by="rank 0", reason="not finite"))
        self.do(make_checkpoint(self.run, version, STATE, parent=self.parent, metrics={"loss": loss}))
        if healthy:
            self.sound.add(version)
            self.good_once = True

    @rule()
    def fail_to_commit(self) -> None:
        self.step += 1
        version = Version(self.step, self.generation)
        self.unfinished.append((version, self.do(write_rank(self.run, version, STATE, parent=self.parent))))

    @precondition(lambda self: self.unfinished)
    @rule()
    def commit_late(self) -> None:
        version, receipt = self.unfinished.pop(0)
        # As a daemon does it: it reads the receipt, and looks for a tombstone.
        keys = self.do(keys_of(self.run.backend, checkpoint_prefix(version)))
        assume(keys and f"{TOMBSTONES}{version}.json" not in self.do(keys_of(self.run.backend, TOMBSTONES)))
        self.do(commit(self.run, [receipt]))
        self.sound.add(version)
        self.good_once = True

    @rule(back=st.integers(0, 3))
    def start_again(self, back: int) -> None:
        line = self.line()
        self.parent = parent = line[back] if back < len(line) else None
        self.generation = self.do(open_generation(self.run, opened_from=parent))
        self.step = parent.step if parent else 0

    @rule(back=st.integers(0, 3))
    def start_again_and_diverge(self, back: int) -> None:
        self.start_again(back)
        self.save(healthy=False, loss=None, steps=1)

    # What is found out

    @rule(number=st.integers(0, 5))
    def look_at(self, number: int) -> None:
        line = self.line()
        assume(number < len(line))
        found = self.do(verify(self.run, line[number]))
        was_known = self.known(line[number])
        self.do(record_verdict(self.run, line[number], good=found.good, by="test", reason=found.reason))
        if found.good and (was_known is None or was_known.good):
            self.verified_once = True
        if not found.good and (was_known is None or not was_known.suspect):
            self.rotten -= 1

    @rule(number=st.integers(0, 5))
    def rot(self, number: int) -> None:
        """Only what was not verified yet: what rots later, nobody can tell from what does not."""
        line = self.line()
        assume(number < len(line) and line[number] in self.sound)
        known = self.known(line[number])
        assume(known is None or not known.verified)
        assume(self.sound - {line[number]})  # it is not the store that is tried here
        key = self.do(only_key(self.run.backend, checkpoint_prefix(line[number]), ".safetensors"))
        self.do(tamper(self.run.backend, key, flip(-1)))
        self.sound.discard(line[number])
        self.rotten += 1

    @rule(number=st.integers(0, 5), pinned=st.booleans())
    def pin(self, number: int, pinned: bool) -> None:
        line = self.line()
        assume(number < len(line))
        self.do(self.run.add_mark(line[number], "pinned" if pinned else "unpinned", by="me", reason=""))

    # Retention

    @rule(keep=keeps)
    def prune(self, keep: Keep) -> None:
        outcome = self.do(retire(self.run, keep, generation=self.generation))
        assert not outcome.failed
        self.check()

    @rule(keep=keeps, at=st.integers(1, 12), after=st.booleans())
    def prune_and_die(self, keep: Keep, at: int, after: bool) -> None:
        run = Run(Mortal(self.run.backend, at, after=after), self.run.id)
        with contextlib.suppress(Killed):
            self.do(retire(run, keep, generation=self.generation))
        self.check()

    def check(self) -> None:
        committed = set(self.do(self.run.committed()))
        self.sound &= committed
        marks = self.do(self.run.standings())
        for version in self.sound:  # nothing that is committed lacks anything
            assert self.do(verify(self.run, version)).good
        if self.good_once and not self.rotten:
            assert self.sound, f"nothing good is left, of {committed}"
        if self.verified_once:
            assert any(marks[v].verified and v in self.sound for v in committed if v in marks)


@pytest.fixture(autouse=True)
def _orphans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "ORPHAN_SECONDS", -1.0)


TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=60, stateful_step_count=25)
