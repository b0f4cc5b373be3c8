"""The stores that a daemon has open, and what it finds out about them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ckptd.daemon.stores import Stores, Use
from ckptd.daemon.tasks import Tasks
from ckptd.storage import Limits
from ckptd.wire.messages import TierOfRun
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.servers.fault_proxy import FaultProxy, refuse


async def test_a_store_that_did_not_answer_is_examined_again(
    s3_server: S3Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptd.daemon.stores.EXAMINE_AGAIN_SECONDS", 0.05)
    tasks, url = Tasks(), s3_server.prefix()
    with FaultProxy(s3_server) as proxy:
        proxy.fault("*", refuse(403, "AccessDenied"), times=5)
        uses: tuple[Use, ...] = ("nearest", "further", "reading", "verifying")
        stores = Stores({use: Limits() for use in uses}, tmp_path, tasks.spawn)
        await stores.open([TierOfRun(url=url, storage_options=proxy.options, keep={}, shared=True)])

        def wait_for_findings(count: int) -> None:
            wait_until(lambda: len(stores.findings.get(url, "none")) == count, "the self-test", deadline_seconds=20)

        await asyncio.to_thread(wait_for_findings, 1)
        (finding,) = stores.findings[url]
        assert (finding.level, finding.subject) == ("error", "self-test")
        assert f"{url}/" in finding.message
        await asyncio.to_thread(wait_for_findings, 0)
        assert caplog.text.count("self-test: AccessDenied") <= 2, "the same is said once"
        await stores.aclose()
        await tasks.cancel()
