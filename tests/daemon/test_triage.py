"""What a drain makes safe where there is no time for everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.cli.daemon_call import call
from ckptd.daemon.triage import Pending, hopeless
from ckptd.errors import DeadlineExceeded
from ckptd.format.keys import Version
from ckptd.wire.messages import Committed, Done, Drain
from tests.daemon.stored import check_committed, manifest
from tests.daemon.trainer import Member, daemon_at, trainer

MB = 1_000_000
SMALL, LARGE = MB, 24 * MB


def pending(step: int, left_bytes: int) -> Pending:
    return Pending(Version(step, 1), left_bytes)


@pytest.mark.parametrize(
    ("left", "given_up"),
    [
        ({1: 5, 2: 5}, []),  # both fit
        ({1: 10, 2: 10}, [1]),  # one of them does: the newer
        ({1: 2, 2: 90}, [2]),  # the newer never does
        ({1: 80, 2: 90}, [2]),  # neither does: the one of which less is left is tried
        ({1: 90}, []),
    ],
)
def test_the_newest_that_fits_is_chosen(left: dict[int, int], given_up: list[int]) -> None:
    found = hopeless([pending(step, size * MB) for step, size in left.items()], bytes_per_second=MB, seconds=10)
    assert [one.version.step for one in found] == given_up


def test_nothing_is_given_up_before_a_bandwidth_is_known() -> None:
    assert hopeless([pending(1, MB), pending(2, MB)], bytes_per_second=0, seconds=1) == []


def test_a_drain_saves_the_newer_where_there_is_no_time_for_both(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options={"part_bytes": 65536})
    with (
        daemon_at(socket_path, "--bandwidth", "1") as daemon,
        trainer(daemon.socket, member, slot_bytes=LARGE + 2 * MB) as session,
    ):
        session.save(1, LARGE)
        session.wait_for_stage(Version(1, 1), "write")
        session.save(2, SMALL)
        with pytest.raises(DeadlineExceeded, match="given up for want of time: 000000000001-g000001"):
            call(socket_path, Drain(deadline_seconds=12), Done, seconds=30)
        assert isinstance(session.outcome(2), Committed)
        daemon.process.wait(20)
    check_committed(member, 2, size=SMALL)
    assert manifest(tmp_run, Version(1, 1)) is None
