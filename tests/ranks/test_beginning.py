"""A start is all ranks', or nobody's: a rank that cannot begin is no reason for the others to wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.ranks.conftest import ANSWER_SECONDS, RankError, Ranks


def refused(ranks: Ranks, world: int, socket: Path, url: str, culprit: int, options: dict[str, Any]) -> list[RankError]:
    """What each rank raises when all begin, one of them with options that it cannot begin with."""
    ranks.world = world

    def begins(rank: int) -> RankError:
        given = {"rank": rank, "socket": str(socket), **(options if rank == culprit else {})}
        with pytest.raises(RankError) as raised:
            ranks[rank].do("open", url=url, world=world, launch="refused", **given)
        return raised.value

    for rank in range(world):
        ranks[rank].start()
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(begins, rank) for rank in range(world)]
        try:
            return [call.result(ANSWER_SECONDS) for call in calls]
        except TimeoutError:
            ranks.kill()
            raise


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("how", ["state", pytest.param("name", marks=pytest.mark.long), "daemon"])
def test_a_rank_that_cannot_begin_is_told_to_all_at_once(
    ranks: Ranks, daemon: Daemon, tmp_path: Path, tmp_run: str, culprit: int, how: str
) -> None:
    """Its state cannot be saved, or its daemon cannot be trusted. The next start knows nothing of it."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    options, kind, words = {
        "state": ({"beside": "object"}, "StateError", "foreign"),
        "name": ({"beside": "name"}, "StateError", "names: strings that are not empty"),
        "daemon": ({"socket": str(open_to_all / "daemon.sock")}, "AccessDenied", str(open_to_all)),
    }[how]
    for rank, error in enumerate(refused(ranks, 3, daemon.socket, tmp_run, culprit, options)):
        assert error.kind == kind
        assert words in str(error)
        assert rank == culprit or f"rank {culprit}: " in str(error)
    ranks.open(tmp_run, 3, daemon.socket)
    assert {answer["step"] for answer in ranks.each("restore")} == {0}
    ranks.each("save", step=1)
    ranks.each("wait", step=1)
