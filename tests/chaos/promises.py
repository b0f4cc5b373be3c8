"""What the processes of a run have been promised, as far as they have said, and whether what they get back keeps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ckptd.format.keys import Version
from tests.chaos.children import Event
from tests.chaos.stored import Broken


class Promises:
    """*Committed* is promised for ever; *sealed by all ranks* as long as the memory that holds it."""

    def __init__(self) -> None:
        self.committed: set[Version] = set()
        self.worlds: dict[int, int] = {}
        """Generation → how many ranks it has."""
        self._sealed: dict[Version, set[int]] = defaultdict(set)
        self._promised: set[Version] = set()

    @property
    def generation(self) -> int:
        """The newest that a trainer has opened."""
        return max(self.worlds, default=0)

    @property
    def newest(self) -> Version | None:
        """The newest that is promised now."""
        return max(self._promised, key=in_order, default=None)

    def newest_sealed_step(self) -> int:
        """Of the newest generation, by any rank; 0 where there is none."""
        return max((version.step for version in self._sealed if version.generation == self.generation), default=0)

    def saved(self, event: Event, rank: int | None) -> None:
        """A trainer tells how far a save is; ``rank`` of one whose word counts for what is sealed."""
        version = Version(event["step"], event["generation"])
        if rank is not None and event["state"] in ("sealed", "durable", "committed"):
            self._sealed[version].add(rank)
            if len(self._sealed[version]) == self.worlds.get(version.generation):
                self._promised.add(version)
        if event["state"] == "committed":
            self.committed.add(version)

    def seen(self, present: Collection[Version], *, all_kept: bool) -> None:
        """These stand in storage. Raises :class:`Broken` where one is gone that is to stay."""
        if all_kept and (gone := self.committed - set(present)):
            raise Broken(f"{sorted(map(str, gone))} were committed, and are gone")
        self.committed |= set(present)
        self._promised |= set(present)

    def forget_memory(self, present: Collection[Version]) -> None:
        """Trainers and daemon are gone: only what is committed is promised."""
        self.committed |= set(present)
        self._promised = set(self.committed)

    def restored(self, event: Event, world: int) -> None:
        """A trainer tells what it was given. Raises :class:`Broken` for less than was promised, and for a mixture."""
        self.worlds[event["generation"]] = world
        if event["found"] != [float(event["step"])]:
            raise Broken(f"a restore of step {event['step']} gave the numbers {event['found']}")
        got, wanted = Version(event["step"], event["of"]), self.newest
        if wanted is not None and in_order(got) < in_order(wanted):
            raise Broken(f"restored {got}, where {wanted} was promised: {event['decision']}")

    def check_end(self, steps: Collection[int | None]) -> None:
        """The training has ended in peace, at these steps of its ranks; all must be the newest checkpoint's."""
        last = max(self.committed, key=in_order, default=None)
        if last is None or set(steps) != {last.step}:
            raise Broken(f"the last checkpoint is {last}, and the training ended with {steps}")


def in_order(version: Version) -> tuple[int, int]:
    """By which the later one is the newer."""
    return version.generation, version.step
