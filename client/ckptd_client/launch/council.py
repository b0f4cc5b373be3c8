"""The launchers of one start, one on each node: how they hear that it is over, and agree on what comes then.

Everything goes through the store of their rendezvous, under names that no other start has. Nobody leads, since any node
may be the one that died: news are numbered, what is decided is decided by the first who says so, and whoever does not
answer is not waited for. Where the store itself is gone, each node decides alone.
"""

# torch leaves types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from torch._C._distributed_c10d import HashStore

from ckptd.errors import CkptdError, first_line, from_fields, to_fields
from ckptd_client.launch.policy import Failure, History

REPORT_SECONDS = 5.0
"""How long the others may take to end their workers and say what became of them."""
RULING_SECONDS = 180.0
"""How long whoever judges may take: a checkpoint may have to be marked. Then another one does."""
LOOK_SECONDS = 0.1

T = TypeVar("T")
What = Literal["failed", "stopping", "joining"]
log = logging.getLogger("ckptd.run")


@dataclass(frozen=True, slots=True)
class News:
    """The start comes to its end on all nodes, as one of them says: ``failed``: a worker has; ``stopping``: for good,
    after a last save; ``joining``: likewise, for a start with another node."""

    what: What
    node: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a start ended on one node."""

    what: str = ""
    """In words; empty where the node only followed others."""
    died_unix_seconds: float = 0.0
    stopping: bool = False
    """It was asked to stop."""
    stepped: bool = False
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What all nodes do next: stop with ``error``, else start anew after ``wait_seconds``."""

    wait_seconds: float = 0.0
    error: dict[str, str] | None = None
    history: History = field(default_factory=History)

    @classmethod
    def stop(cls, error: CkptdError, history: History) -> Ruling:
        """There is no further start."""
        return cls(error=to_fields(error), history=history)

    @property
    def outcome(self) -> CkptdError | None:
        """The error, as it was raised on the node that judged."""
        error = self.error
        return None if error is None else from_fields(error["error"], error["message"], error["hint"])


class Council:
    """Of one start. Belongs to the launcher's main thread."""

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        """``store``: a ``torch.distributed.Store`` that all nodes of this start share, and no other start. ``node``:
        the number of this one among them."""
        self.node = node
        self.nodes = nodes
        self._store = store
        self._heard = 0
        self._lost = False

    @classmethod
    def alone(cls) -> Council:
        """Of a single node."""
        return cls(HashStore(), 0, 1)

    # News

    def tell(self, what: What, text: str) -> None:
        """For all nodes to hear."""
        news = msgspec.json.encode(News(what, self.node, text)).decode()

        def put() -> None:
            number = self._heard + 1
            while bytes(self._store.compare_set(f"news/{number}", "", news)) != news.encode():
                number += 1

        self._try(put, None)

    def hear(self) -> list[News]:
        """What others have told since the last call."""

        def next_one() -> News | None:
            key = f"news/{self._heard + 1}"
            if not self._store.check([key]):
                return None
            self._heard += 1
            return msgspec.json.decode(bytes(self._store.get(key)), type=News)

        found: list[News] = []
        while (news := self._try(next_one, None)) is not None:
            if news.node != self.node:
                found.append(news)
        return found

    # What comes next

    def report(self, report: Report) -> None:
        """How it ended here."""
        self._try(lambda: self._store.set(f"report/{self.node}", msgspec.json.encode(report)), None)

    def settle(self, report: Report, judge: Callable[[Mapping[int, Report]], Ruling]) -> Ruling:
        """The same ruling on all nodes that live. One of them, that has got as far as any, calls ``judge``, with the
        reports of all that gave one in time, by node."""
        self.report(report)
        reports = {**self._reports(), self.node: report}
        best = report.stepped or not any(other.stepped for other in reports.values())
        if not best or self._first("judge", str(self.node).encode()) != str(self.node).encode():
            ruling = self._await("ruling", RULING_SECONDS, Ruling)
            if ruling is not None:
                return ruling
            log.warning("no ruling came within %g s: this node makes one", RULING_SECONDS)
        mine = msgspec.json.encode(judge(reports))
        return msgspec.json.decode(self._first("ruling", mine), type=Ruling)

    def _reports(self) -> dict[int, Report]:
        until = time.monotonic() + REPORT_SECONDS
        found: dict[int, Report] = {}
        for node in set(range(self.nodes)) - {self.node}:
            report = self._await(f"report/{node}", until - time.monotonic(), Report)
            if report is not None:
                found[node] = report
        return found

    # The store

    def _first(self, key: str, value: bytes) -> bytes:
        """What the first node has put there; this one's own where the store is gone."""
        return self._try(lambda: bytes(self._store.compare_set(key, "", value.decode())), value)

    def _await(self, key: str, seconds: float, kind: type[T]) -> T | None:
        """In short waits, so that a signal is heard meanwhile."""
        until = time.monotonic() + seconds
        while not self._lost:
            if self._try(lambda: bool(self._store.check([key])), False):
                data = self._try(lambda: bytes(self._store.get(key)), b"")
                return msgspec.json.decode(data, type=kind) if data else None
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_SECONDS)
        return None

    def _try(self, work: Callable[[], T], otherwise: T) -> T:
        if not self._lost:
            try:
                return work()
            except (RuntimeError, ValueError) as error:  # torch has no narrower type for a lost store
                self._lost = True
                log.warning("the store of the rendezvous is lost, and this node decides alone: %s", first_line(error))
        return otherwise


def merged(reports: Mapping[int, Report], nodes: int) -> Failure:
    """One failure of the whole start, as all nodes tell it: who died first comes first."""
    by_death = sorted(reports.items(), key=lambda item: item[1].died_unix_seconds)
    told = [(node, report.what) for node, report in by_death if report.what]
    words = [what if nodes == 1 else f"node {node}: {what}" for node, what in told]
    words += [f"node {node} is silent" for node in range(nodes) if node not in reports]
    steps = [report.last_step for report in reports.values() if report.last_step is not None]
    return Failure(
        at_seconds=time.time(),
        what="; ".join(words[:4]) or "the group failed",
        stepped=any(report.stepped for report in reports.values()),
        last_step=max(steps, default=None),
    )
