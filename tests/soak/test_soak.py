"""The ranks of a node on one daemon with slow stores, for some seconds; ``make soak`` does the same for long."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ckptd.limits import MIB
from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import Nursery
from tests.soak.soak import Soak
from tests.soak.verdict import problems_of

SLOW = {"delay_seconds": 0.2, "bytes_per_second": 40 * MIB}


@pytest.mark.long
def test_r141_what_a_node_holds_stays_flat(private_folders: Path, s3_server: S3Endpoint) -> None:
    folder = private_folders / uuid.uuid4().hex[:8]
    with Nursery() as nursery, Soak(nursery, folder, s3_server, ranks=20, **SLOW) as soak:
        soak.begin()
        soak.go_on(20, every_seconds=0.5)
        soak.end()
    assert problems_of(soak) == []
