"""The ranks of a whole node on one daemon, whose stores are slow: what they hold is to stay flat, and back-pressure to
do what each run has asked for."""

from __future__ import annotations

import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptd.limits import MIB, SLOT_SLACK_BYTES_MIN, SLOT_SLACK_FRACTION
from ckptd.pulse.page import STATUS_BYTES
from ckptd.pulse.rows import ROWS_BYTES
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import Child, Event, Nursery, listen
from tests.chaos.stored import Broken, Stored
from tests.soak.holdings import Course, holding_of, together

DEADLINE_SECONDS = 240.0
SLOTS = 2
PAUSE_SECONDS = 0.1
WAITED_SECONDS = 0.02
"""From here on a save has waited for a slot, and not only for a processor."""
TENSORS = 3
KEPT = 2
STATED_BUDGET_BYTES = 512 * MIB
"""What a daemon takes beside its arenas, as ``docs/operations.md`` says."""


@dataclass(frozen=True)
class Plan:
    """One run, and what its trainers do where all slots are full."""

    name: str
    on_full: Literal["wait", "skip", "fail"]
    max_wait: float
    elements: int
    """Of each tensor; the optimizer holds as many again."""
    s3: bool = False

    @property
    def state_bytes(self) -> int:
        return 2 * TENSORS * self.elements * 4


PLANS = (
    Plan("waits", "wait", 120.0, 40_000),
    Plan("waits briefly", "wait", 0.05, 40_000),
    Plan("skips", "skip", 120.0, 40_000),
    Plan("fails", "fail", 120.0, 40_000),
    Plan("waits, on S3", "wait", 120.0, 300_000, s3=True),
)
"""The last one's shards go up in several parts."""


@dataclass
class Outcome:
    """What became of the saves of one run, all ranks together."""

    saves: Counter[str] = field(default_factory=Counter[str])
    """``committed``, or the kind of error → how many."""
    waited: int = 0
    """Saves that waited for a free slot."""
    refused: int = 0
    """Saves that found none, and gave up."""


class Soak:
    """A context manager: whatever still lives at its end is killed."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        server: S3Endpoint,
        *,
        ranks: int,
        delay_seconds: float,
        bytes_per_second: int,
    ) -> None:
        """``ranks``: all runs together. ``delay_seconds``: of the daemon's stores before each request.
        ``bytes_per_second``: that the daemon writes to all of them."""
        folder.mkdir(mode=0o700)
        (folder / "s").mkdir(mode=0o700)
        self._nursery = nursery
        self._folder = folder
        self._socket = str(folder / "s" / "d.sock")
        self._world = ranks // len(PLANS)
        self.ranks = self._world * len(PLANS)
        self._daemon_config = {
            "kind": "daemon",
            "socket": self._socket,
            "log": f"{folder}/log",
            "slow_seconds": delay_seconds,
            "settings": {
                "budgets": {"write_bytes_per_second": bytes_per_second},
                "retention_grace_seconds": 0.5,
            },
        }
        self.stores = {
            plan.name: Stored(
                server.prefix() if plan.s3 else f"file://{folder}/{plan.name.replace(' ', '-')}",
                server if plan.s3 else None,
            )
            for plan in PLANS
        }
        self.outcomes = {plan.name: Outcome() for plan in PLANS}
        self.daemon = Course()
        self.clients = Course()
        self.uploads: list[int] = []
        self.temporaries: list[int] = []
        self.commits: list[dict[str, int]] = []
        """Of each run, all ranks together, at each look."""
        self._children: list[Child] = []
        self._trainers: dict[str, list[Child]] = defaultdict(list)

    def __enter__(self) -> Soak:
        self._children.append(self._nursery.child(self._daemon_config))
        for plan in PLANS:
            launch = uuid.uuid4().hex
            for rank in range(self._world):
                child = self._nursery.child(self._config(plan, rank, launch))
                self._trainers[plan.name].append(child)
                self._children.append(child)
        return self

    def _config(self, plan: Plan, rank: int, launch: str) -> dict[str, Any]:
        return {
            "kind": "trainer",
            "plan": plan.name,
            "url": self.stores[plan.name].url,
            "storage_options": self.stores[plan.name].options,
            "socket": self._socket,
            "log": f"{self._folder}/log",
            "rank": rank,
            "world": self._world,
            "launch": launch,
            "takeover": False,
            "keep": KEPT,
            "on_full": plan.on_full,
            "max_wait": plan.max_wait,
            "slots": SLOTS,
            "start_daemon": False,
            "in_step": f"{self._folder}/s/{plan.name}",
            "tensors": TENSORS,
            "elements": plan.elements,
            "steps": 10**9,
            "wait": "",
            "pause_seconds": PAUSE_SECONDS,
        }

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.add_note(f"processes wrote to {self._folder}/log")
        for child in self._children:
            child.close()
        for store in self.stores.values():
            store.close()

    # News

    def _heard(self, child: Child, event: Event) -> None:
        match event["event"]:
            case "broke" | "refused":
                raise Broken(f"a process broke: {event}")
            case "save" if event["state"] in ("committed", "failed"):
                outcome = self.outcomes[child.config["plan"]]
                outcome.saves[event["error"] or "committed"] += 1
                outcome.waited += event["waited_seconds"] > WAITED_SECONDS
                outcome.refused += "no free slot" in event["message"]
            case _:
                pass

    def _listen(self, until: Callable[[], bool], what: str) -> None:
        if not listen(self._children, until, DEADLINE_SECONDS, self._heard):
            raise Broken(f"waited {DEADLINE_SECONDS:g} s for {what}")

    def _all_said(self, event: str) -> bool:
        return all(child.last(event) is not None for child in self._children[1:])

    # The way

    def begin(self) -> None:
        """Until all ranks of all runs are training."""
        self._listen(lambda: self._all_said("restored"), "all to begin")

    def go_on(self, seconds: float, every_seconds: float, report: Callable[[str], None] = lambda line: None) -> None:
        """Look at what is held every so often, for so long."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            listen(self._children, lambda: False, every_seconds, self._heard)
            for child in self._children:
                child.events.clear()  # what was heard is counted
            self._look()
            report(f"{time.monotonic() - began:.0f} s: {self.in_words()}")

    def _look(self) -> None:
        if ended := [child for child in self._children if not child.alive]:
            kinds = ", ".join(f"{child.config['kind']} {child.pid}" for child in ended)
            raise Broken(f"ended before its time: {kinds}; where all have, whoever had forked them was killed")
        self.daemon.holdings.append(holding_of(self._children[0].pid))
        self.clients.holdings.append(together(holding_of(child.pid) for child in self._children[1:]))
        left = {plan: len(self.stores[plan.name].left_over()) for plan in PLANS}
        self.uploads.append(sum(count for plan, count in left.items() if plan.s3))
        self.temporaries.append(sum(count for plan, count in left.items() if not plan.s3))
        self.commits.append({name: outcome.saves["committed"] for name, outcome in self.outcomes.items()})

    def end(self) -> None:
        """All runs end at a step of their own, and nothing is left over."""
        for trainers in self._trainers.values():
            trainers[0].signal(signal.SIGTERM)
        self._listen(lambda: self._all_said("end"), "all to end")
        wait_until(
            lambda: not any(child.alive for child in self._children[1:]),
            "the trainers to end",
            deadline_seconds=DEADLINE_SECONDS,
        )
        for store in self.stores.values():
            store.check()
            wait_until(lambda: not store.left_over(), "what is left over to go", deadline_seconds=DEADLINE_SECONDS)  # noqa: B023

    # What it came to

    @property
    def arenas_bytes(self) -> int:
        """What ``docs/operations.md`` says that the arenas take."""
        return self._world * sum(
            SLOTS * (plan.state_bytes + max(int(plan.state_bytes * SLOT_SLACK_FRACTION), SLOT_SLACK_BYTES_MIN))
            for plan in PLANS
        )

    @property
    def pages_bytes(self) -> int:
        """What the rings take once they are full: each rank's status page, and the rows of the first rank of a run."""
        return self.ranks * STATUS_BYTES + len(PLANS) * ROWS_BYTES

    def summary(self) -> Iterator[str]:
        """Lines of figures over the whole time."""
        for name, course in (("daemon", self.daemon), ("clients", self.clients)):
            before, after = course.before_and_after()
            for when, held in (("second quarter", before), ("last quarter", after), ("at most", course.peak())):
                yield f"{name}, {when}: {held}"
        yield f"arenas, as stated: {self.arenas_bytes / MIB:.1f} MiB; pages and rows: {self.pages_bytes / MIB:.1f} MiB"
        yield f"at most {max(self.uploads)} uploads and {max(self.temporaries)} temporary files at once"
        for name, outcome in self.outcomes.items():
            yield f"{name}: {dict(outcome.saves)}, {outcome.waited} waited, {outcome.refused} found no free slot"

    def in_words(self) -> str:
        """The latest figures."""
        saves = {name: dict(outcome.saves) for name, outcome in self.outcomes.items()}
        return (
            f"daemon {self.daemon.holdings[-1]}; clients {self.clients.holdings[-1]}; "
            f"{self.uploads[-1]} uploads, {self.temporaries[-1]} temporaries; saves {saves}"
        )
