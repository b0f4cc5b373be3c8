"""The preflight of real groups of ranks, of which one is on a node that is really bad."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from typer.testing import CliRunner, Result

from ckptd.cli.app import app
from ckptd.errors import DeadlineExceeded
from ckptd.health.gpu import Gpus
from ckptd.health.report import Check, Member
from ckptd.health.verdict import judge
from ckptd.limits import MIB
from ckptd_client.preflight.devices import driver_checks
from ckptd_client.preflight.own import bounded
from devtools.processes import free_ports
from devtools.seaweedfs import S3Endpoint
from tests.health.replayed_nvml import ReplayedNvml
from tests.ranks.conftest import Rank
from tests.servers.fault_proxy import Exchange, FaultProxy

WELL, FAULT, BAD = 0, 11, 14
LONG_AGO = "Mon, 01 Jan 2024 00:00:00 GMT"
QUICK = {
    "probe_bytes": MIB,
    "traffic_bytes": MIB,
    "roll_call_seconds": 30.0,
    "checks_seconds": 30.0,
    "pair_seconds": 3.0,
}


class World:
    """Some ranks, each on a node of its own, and the store that a launcher would have."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def begin(self, pool: ThreadPoolExecutor, own: dict[int, dict[str, Any]], **same: Any) -> list[Future[Any]]:
        """Start the preflight on all ranks; ``own``: what single ones are told besides."""
        world = len(self.ranks)
        return [
            pool.submit(
                found.do,
                "preflight",
                port=self.store.port,
                rank=rank,
                world=world,
                node=f"node{rank}",
                **{**QUICK, **same, **own.get(rank, {})},
            )
            for rank, found in enumerate(self.ranks)
        ]

    def examine(self, own: dict[int, dict[str, Any]] | None = None, **same: Any) -> tuple[int, dict[str, Any]]:
        """The exit code, the same on all ranks, and the one report."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            answers = [call.result(100) for call in self.begin(pool, own or {}, **same)]
        (code,) = {answer["code"] for answer in answers}
        (report,) = [report for answer in answers for report in answer["shown"]]
        return code, report


@pytest.fixture
def world(workers: list[Rank]) -> Iterator[World]:
    for worker in workers[:3]:
        worker.start()
    found = World(workers[:3])
    yield found
    del found.store


def bad(report: dict[str, Any]) -> dict[str, list[str]]:
    """Node → why."""
    return {node["node"]: node["reasons"] for node in report["bad_nodes"]}


def limit(rank: Rank, kind: int, soft: int) -> int:
    """Set a limit of a living process; the old one."""
    before, hard = resource.prlimit(rank.pid, kind)
    resource.prlimit(rank.pid, kind, (soft, hard))
    return before


def test_nodes_that_are_well(world: World, tmp_run: str) -> None:
    code, report = world.examine(url=tmp_run)
    assert (code, bad(report), report["faults"]) == (WELL, {}, [])
    assert [pair["ranks"] for pair in report["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["outcome"] == "well" and pair["bytes_per_second"] > 0 for pair in report["pairs"])
    for member in report["members"]:
        subjects = {check["subject"] for check in member["checks"]}
        assert {"CPU matmul", "memory", "shared memory", "open files", "put and get"} <= subjects
        assert {"store rate", "clock against the store", "all ranks"} <= subjects
    assert list(Path(tmp_run.removeprefix("file://")).rglob("*preflight*")) == []


def test_a_rank_that_stops_on_the_way_is_named(world: World) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls = world.begin(pool, {})
        world.store.wait(["ckptd-preflight/0/checked/0"], timedelta(seconds=60))
        world.ranks[0].signal(signal.SIGSTOP)
        try:
            answers = [call.result(100) for call in calls[1:]]
        finally:
            world.ranks[0].signal(signal.SIGCONT)
        late = calls[0].result(100)
    (report,) = answers[0]["shown"]
    assert list(bad(report)) == ["node0"]
    assert "rank 0: did not answer" in bad(report)["node0"]
    assert [answer["code"] for answer in (*answers, late)] == [BAD] * 3
    assert (answers[1]["shown"], late["shown"]) == ([], []), "one report is enough"


@contextlib.contextmanager
def slowed(rank: Rank) -> Iterator[None]:
    """It runs for a twentieth of the time, as on a processor that is throttled, or that others have taken."""
    done = threading.Event()

    def hold_up() -> None:
        while not done.wait(0.005):
            rank.signal(signal.SIGSTOP)
            done.wait(0.095)
            rank.signal(signal.SIGCONT)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.long
def test_a_rank_that_is_really_slow_is_named(world: World) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls = world.begin(pool, {}, traffic_bytes=16 * MIB, pair_seconds=30.0)
        world.store.wait(["ckptd-preflight/0/checked/1"], timedelta(seconds=60))
        with slowed(world.ranks[1]):
            answers = [call.result(100) for call in calls]
    (report,) = [report for answer in answers for report in answer["shown"]]
    assert [answer["code"] for answer in answers] == [BAD] * 3, report["pairs"]
    ((name, (reason,)),) = bad(report).items()
    assert name == "node1"
    assert reason.startswith("rank 1: slow with all it met: at best ")
    assert [pair["outcome"] for pair in report["pairs"]] == ["well"] * 3


@pytest.mark.long
def test_a_rank_that_never_comes_is_named(world: World) -> None:
    world.ranks[2].signal(signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        calls = world.begin(pool, {}, roll_call_seconds=4.0)
        try:
            answers = [call.result(100) for call in calls[:2]]
        finally:
            world.ranks[2].signal(signal.SIGCONT)
        answers.append(calls[2].result(100))
    (report,) = answers[0]["shown"]
    assert [(node["node"], node["ranks"]) for node in report["bad_nodes"]] == [("", [2])]
    assert [answer["code"] for answer in answers] == [BAD] * 3


def test_a_rank_without_a_way_to_the_others_is_named(world: World) -> None:
    code, report = world.examine({1: {"environment": {"GLOO_SOCKET_IFNAME": "nowhere0"}}})
    assert (code, list(bad(report))) == (BAD, ["node1"])
    assert "reached none of ranks 0, 2" in bad(report)["node1"][0]
    assert "nowhere0" in bad(report)["node1"][0]
    ends = {member["rank"]: member["checks"][-1]["message"] for member in report["members"]}
    assert "a sum over 2 ranks is right" in ends[0]
    assert "a sum over" not in ends[1], "it is left out"


def test_limits_and_a_store_of_one_node_are_its_own(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = limit(world.ranks[1], resource.RLIMIT_NOFILE, 200)
    locked = limit(world.ranks[1], resource.RLIMIT_MEMLOCK, 4096)
    try:
        code, report = world.examine({2: {"url": str(tmp_path / "file" / "run")}}, url=str(tmp_path / "run"))
    finally:
        limit(world.ranks[1], resource.RLIMIT_NOFILE, files)
        limit(world.ranks[1], resource.RLIMIT_MEMLOCK, locked)
    assert (code, list(bad(report))) == (BAD, ["node1", "node2"])
    assert [reason for reason in bad(report)["node1"] if "open files: at most 200" in reason]
    assert [text for text in report["warnings"] if text.startswith("rank 1: locked memory: at most 4.0 KiB")]
    assert any("store rate" in reason for reason in bad(report)["node2"])


@pytest.mark.long
def test_files_that_cannot_grow_are_found_in_memory_and_on_disk(world: World, tmp_run: str) -> None:
    before = limit(world.ranks[2], resource.RLIMIT_FSIZE, 64 * 1024)
    try:
        code, report = world.examine(url=tmp_run)
    finally:
        limit(world.ranks[2], resource.RLIMIT_FSIZE, before)
    assert (code, list(bad(report))) == (BAD, ["node2"])
    subjects = {reason.split(": ")[1] for reason in bad(report)["node2"]}
    assert {"shared memory", "store rate"} <= subjects


@pytest.mark.long
def test_a_store_that_fails_for_all_is_no_nodes_fault(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, report = world.examine(url=str(tmp_path / "file" / "run"))
    assert (code, bad(report)) == (FAULT, {})
    assert any(fault.startswith("store rate") for fault in report["faults"])


def test_a_clock_that_differs_from_the_stores_is_named(world: World, s3_server: S3Endpoint) -> None:
    def long_ago(exchange: Exchange) -> None:
        answer = exchange.pass_on()
        times = {name for name in answer.headers if name.lower() in ("date", "last-modified")}
        exchange.reply(replace(answer, headers={**answer.headers, **dict.fromkeys(times, LONG_AGO)}))

    url = s3_server.prefix()
    with FaultProxy(s3_server) as proxy:
        proxy.fault("HeadObject", long_ago)

        def options(found: dict[str, Any]) -> dict[str, Any]:
            return {"storage_options": [f"{key}={json.dumps(value)}" for key, value in found.items()]}

        code, report = world.examine({1: options(proxy.options)}, url=url, **options(s3_server.options))
    assert (code, list(bad(report))) == (BAD, ["node1"]), report["faults"]
    assert "clock against the store: the store's clock differs by -" in bad(report)["node1"][0]


# The command


def preflight(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["preflight", "--probe", "1MiB", *map(str, arguments)])


def test_one_machine(tmp_run: str) -> None:
    done = preflight(tmp_run, "--json")
    assert done.exit_code == WELL, done.output
    report = json.loads(done.stdout)
    assert [member["rank"] for member in report["members"]] == [0]
    (rate,) = [check for check in report["members"][0]["checks"] if check["subject"] == "store rate"]
    assert rate["figures"].keys() == {"write_bytes_per_second", "read_bytes_per_second"}
    told = preflight(tmp_run, "--state-bytes", "900TiB")
    assert told.exit_code == BAD, told.output
    assert "bad node: " in told.stdout
    assert "rank 0: memory: 1 rank with 2 slots need" in told.stdout


def test_a_store_that_one_machine_cannot_use_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = preflight(tmp_path / "file" / "run", "--single")
    assert done.exit_code == FAULT
    assert "fault: store rate" in done.stdout


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = preflight()
    assert done.exit_code == 2
    assert "pip install 'ckptd[torch]'" in done.stderr


def test_a_launcher_whose_store_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    launcher = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    done = preflight("--roll-call", 1)
    assert done.exit_code == DeadlineExceeded.exit_code
    assert "no store to meet in" in done.stderr


def test_a_driver_that_hangs_ends_no_check_before_it_and_is_told() -> None:
    leave = threading.Event()

    def checks() -> Iterator[Check]:
        yield Check(level="ok", subject="CPU matmul", message="right")
        leave.wait()

    found = bounded(checks(), 0.2)
    leave.set()
    assert [check.level for check in found] == ["ok", "error"]
    assert found[1].message == "nothing came for 0.2 s after 'CPU matmul'"


def test_what_the_driver_says_is_a_check_of_its_gpu() -> None:
    nvml = ReplayedNvml("memory_error")
    gpus = Gpus(nvml)
    assert [check.level for check in driver_checks(gpus)] == ["ok"]
    nvml.advance()
    report = judge(1, {0: "n0"}, [Member(rank=0, node="n0", checks=tuple(driver_checks(gpus)))])
    gpus.close()
    (node,) = report.bad_nodes
    assert node.reasons[0].startswith("rank 0: GPU 1 (GPU-5f1c0a7e-bbbb")
    assert len(node.reasons) == 4
