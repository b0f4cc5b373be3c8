"""How the ranks of one start agree: each says what it has, rank 0 decides, all hear the same decision.

One request per rank each way, through a key-value store; JSON, a deadline, no collective, no GPU memory. Rank 0's
failure to decide is an error on every rank, and so is a rank that does not answer: it is named.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ckptd.errors import (
    ConfigError,
    DeadlineExceeded,
    FormatError,
    UsageError,
    from_fields,
    to_fields,
)
from ckptd.format.digests import hex_digest
from ckptd.format.keys import AGREEMENT
from ckptd.limits import AGREEMENT_SECONDS
from ckptd_client.meeting import OwnStore, StorageStore, Store, TorchStore
from ckptd_client.roll_call import roll_call
from ckptd_client.roots import Root
from ckptd_client.topology import LAUNCH_VARIABLE, Topology, node_id, number_nodes, torch_store

T = TypeVar("T")


class Agreement:
    """Questions that all ranks put in the same order. Not thread-safe."""

    def __init__(self, store: Store, rank: int, world: int, *, deadline_seconds: float = AGREEMENT_SECONDS) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self._deadline_seconds = deadline_seconds
        self._asked = 0

    def decide(self, topic: str, mine: Any, decide: Callable[[list[Any]], T]) -> T:
        """Every rank gives ``mine``; rank 0 alone calls ``decide`` with all of them, by rank; all get its result.

        ``mine``: plain JSON data as the result is, or a function that gives it, whose failure is everybody's. Raises on
        every rank what that raised on any, or ``decide`` on rank 0; :class:`UsageError` where a rank puts another
        question; and :class:`DeadlineExceeded` naming the ranks that did not answer.
        """
        self._asked += 1
        key = f"{self._asked:04d}"
        part: dict[str, Any] = {"topic": topic}
        try:
            part["value"] = mine() if callable(mine) else mine
        except Exception as error:
            self._leave(key, part | to_fields(error))
            raise
        if self.rank != 0:
            self._leave(key, part)
            answer = self._await_answer(key, topic)
            if "error" in answer:
                raise from_fields(answer["error"], f"rank 0: {answer['message']}", answer["hint"])
            return cast(T, answer["result"])
        try:
            result = decide(self._collect(key, topic, part["value"]))
        except Exception as error:
            self._leave(key, {"topic": topic} | to_fields(error))
            raise
        self._leave(key, {"topic": topic, "result": result})
        return result

    def _leave(self, key: str, value: Mapping[str, Any]) -> None:
        """This rank's part; of rank 0, the answer."""
        if self.world > 1:
            self.store.put(_name(key, self.rank), msgspec.json.encode({"rank": self.rank, **value}))

    def _collect(self, key: str, topic: str, mine: Any) -> list[Any]:
        values = [mine]
        late: list[int] = []
        stop = time.monotonic() + self._deadline_seconds
        for rank in range(1, self.world):
            try:
                left = max(stop - time.monotonic(), 0.0)
                part = _left_by(rank, key, self.store.get(_name(key, rank), left), "value")
            except DeadlineExceeded:
                late.append(rank)
                continue
            if part["topic"] != topic:
                raise UsageError(
                    f"rank 0 is at {topic!r}, and rank {rank} at {part['topic']!r}",
                    hint="all ranks call the same methods in the same order, for the same step",
                )
            if "error" in part:
                raise from_fields(part["error"], f"rank {rank}: {part['message']}", part["hint"])
            values.append(part["value"])
        if late:
            raise DeadlineExceeded(
                f"ranks {late} did not answer {topic!r} within {self._deadline_seconds:g} s",
                hint="do all ranks call the same methods in the same order?",
            )
        return values

    def _await_answer(self, key: str, topic: str) -> dict[str, Any]:
        # Rank 0 may use its whole time to wait for others before it can say so.
        try:
            data = self.store.get(_name(key, 0), self._deadline_seconds * 2)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"rank 0 did not answer {topic!r}: {error.message}") from None
        answer = _left_by(0, key, data, "result")
        if "error" not in answer and answer["topic"] != topic:
            raise _damaged(0, key, f"it answers {answer['topic']!r}, and {topic!r} was asked")
        return answer


def _name(key: str, rank: int) -> str:
    """Where a rank leaves its part of a question; rank 0, the answer."""
    return f"{key}-{rank:05d}.json" if rank else f"{key}.json"


def _left_by(rank: int, key: str, data: bytes, wanted: str) -> dict[str, Any]:
    """What a rank has left for the others: what they want of it, or an error. Raises :class:`FormatError`."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise _damaged(rank, key, str(error)) from None
    complete = "topic" in found and (wanted in found or {"error", "message", "hint"} <= found.keys())
    if found.get("rank") != rank or not complete:
        raise _damaged(rank, key, f"it is not what rank {rank} leaves")
    return found


def _damaged(rank: int, key: str, why: str) -> FormatError:
    return FormatError(
        f"what rank {rank} has left in {AGREEMENT}…/{_name(key, rank)} is damaged: {why:.200}",
        hint="start all ranks anew; another start leaves what it says elsewhere",
    )


def nodes_of(agreement: Agreement, socket: Path, get_ready: Callable[[], T]) -> tuple[T, tuple[int, ...]]:
    """What ``get_ready`` gives on this rank, and for each rank the number of its node, which is where its daemon's
    ``socket`` lies. Raises on all ranks what ``get_ready`` raised on any: none of them waits for one that cannot begin.
    """
    found: list[T] = []

    def here() -> str:
        found.append(get_ready())
        return node_id(socket) if agreement.world > 1 else ""

    numbers = agreement.decide("nodes", here, number_nodes)
    return found[0], tuple(numbers)


_opened: Counter[tuple[str, str]] = Counter()


def open_agreement(topology: Topology, root: Root, name: str) -> Agreement:
    """The way in which this start's ranks agree: alone, through torch's store, or through the run's storage: ``root``,
    which all ranks must see. ``name``: of the run, the same on all ranks.

    Raises :class:`ConfigError` for several ranks that have neither a store nor a launch id in common, and
    :class:`DeadlineExceeded` for a rank that does not come.
    """
    # The same on all ranks, as all construct the Checkpointers of a run in the same order.
    _opened[root.launch, name] += 1
    number = _opened[root.launch, name]
    if topology.world == 1:
        return Agreement(OwnStore(), 0, 1)
    store = torch_store()
    if store is not None:
        prefix = f"ckptd/{topology.launch}/{hex_digest(name.encode())}/{number}/"
        start = roll_call(TorchStore(store, prefix), topology.rank, topology.world, AGREEMENT_SECONDS)
        return Agreement(TorchStore(store, f"{prefix}{start}/"), topology.rank, topology.world)
    if not topology.launch:
        raise ConfigError(
            f"{topology.world} ranks have no way to agree: no process group, no torchrun, no launch id",
            hint=f"initialize torch.distributed first, or give each start a {LAUNCH_VARIABLE}, equal on all ranks",
        )
    return Agreement(StorageStore(root, number, topology.world), topology.rank, topology.world)
