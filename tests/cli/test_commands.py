"""The commands, as a person and as a program use them."""

from __future__ import annotations

import asyncio
import json
import os
import sysconfig
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ckptd.checkpoint.run import Run
from ckptd.cli import daemon_commands, output
from ckptd.cli.app import app
from ckptd.cli.doctor import Wishes, check_store
from ckptd.cli.options import parse_size, parse_storage_options
from ckptd.errors import AccessDenied, ConfigError, Unavailable
from ckptd.storage import Finding, open_backend
from ckptd_backends.wrappers.base import Wrapper
from devtools.processes import kill_group, spawn, wait_until
from devtools.seaweedfs import S3Endpoint
from tests.checkpoint.builder import flip, keys_of, make_run, only_key, small_state, tamper, write_rank

EXIT_DAMAGED, EXIT_NONE, EXIT_FALLBACK, EXIT_USAGE, EXIT_NO_DAEMON = 5, 6, 13, 2, 10


def ckptd(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ckptd_json(*arguments: object, exit_code: int = 0) -> Any:
    """Run the command with ``--json`` and read what it says."""
    done = ckptd(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def change(url: str, work: Callable[[Run], Awaitable[object]]) -> None:
    """Do something with the run at a URL."""

    async def inside() -> None:
        backend = open_backend(url)
        await work(await Run.open(backend, create=True))
        await backend.aclose()

    asyncio.run(inside())


@pytest.fixture
def url(tmp_run: str) -> str:
    """A run on disk with three checkpoints on its line, one beside it, and one that was never finished."""

    async def make(run: Run) -> None:
        first = await make_run(run, [10, 20])
        second = await make_run(run, [15, 30], opened_from=first[0])
        await run.add_mark(first[0], "pinned", by="me", reason="good")
        await write_rank(run, second[1].__class__(40, 2), small_state())

    change(tmp_run, make)
    return tmp_run


def test_ls(url: str) -> None:
    found = ckptd_json("ls", url)
    assert [(item["checkpoint"], item["notes"]) for item in found] == [
        ("30-g2", []),
        ("15-g2", []),
        ("10-g1", ["pinned"]),
        ("20-g1", ["off the line"]),
        ("40-g2", ["incomplete, never used"]),
    ]
    text = ckptd("ls", url).stdout
    assert all(item["checkpoint"] in text for item in found)
    assert "pinned" in text


def test_show(url: str) -> None:
    shown = ckptd_json("show", url)
    assert (shown["checkpoint"], shown["parent"], shown["world"]) == ("30-g2", "10-g1", 1)
    assert [tensor["name"] for tensor in shown["tensors"]] == ["model/bias", "model/weight", "optimizer/exp_avg"]
    assert [(tensor["cut"], tensor["rank"]) for tensor in shown["tensors"]] == [
        ([1], None),
        ([1, 1], None),
        ([1, 1], None),
    ]
    assert ckptd_json("show", url, "10")["marks"] == [{"mark": "pinned", "by": "me", "reason": "good"}]
    text = ckptd("show", url, "20-g1").stdout
    assert "model/weight" in text
    assert "[700, 1000]" in text
    missing = ckptd("show", url, "77")
    assert missing.exit_code == EXIT_NONE
    assert missing.stderr == (
        f"ckptd: NoCheckpoint: {url}: there is no checkpoint 77\n       there are 30-g2, 15-g2, 10-g1\n"
    )


def test_verify(url: str) -> None:
    assert ckptd_json("verify", url)["good"] == "30-g2"
    assert ckptd("verify", url, "20-g1").exit_code == 0

    async def damage(run: Run) -> None:
        key = await only_key(run.backend, "checkpoints/000000000030-g000002/", ".safetensors")
        await tamper(run.backend, key, flip(-1))

    change(url, damage)
    assert ckptd("verify", url, "30").exit_code == EXIT_DAMAGED
    assert ckptd("verify", url, "15").exit_code == 0
    found = ckptd_json("verify", url, exit_code=EXIT_FALLBACK)
    assert (found["good"], [item["good"] for item in found["tried"]]) == ("15-g2", [False, True])
    text = ckptd("verify", url).stdout
    assert "damaged  30-g2" in text
    assert "of tensor 'model/bias', differ from their digest" in text
    assert "good     15-g2" in text


def test_verify_records_its_verdict_and_takes_it_back(url: str) -> None:
    def notes() -> list[str]:
        return ckptd_json("ls", url)[0]["notes"]

    ckptd_json("verify", url, "--no-mark")
    assert notes() == []
    ckptd_json("verify", url)
    assert notes() == ["verified"]
    key = asyncio.run(only_key(open_backend(url), "checkpoints/000000000030-g000002/", ".safetensors"))
    change(url, lambda run: tamper(run.backend, key, flip(-1)))
    ckptd_json("verify", url, exit_code=EXIT_FALLBACK)
    assert notes() == ["suspect"]
    assert ckptd_json("ls", url)[1]["notes"] == ["verified"]
    change(url, lambda run: tamper(run.backend, key, flip(-1)))
    ckptd_json("verify", url, "30")
    assert notes() == ["verified"]


def test_verify_really_loads_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaders.py").write_text(
        "def load(url, checkpoint, options):\n"
        f"    assert url == {url!r} and options == {{}}\n"
        "    assert checkpoint != '30-g2', 'it is of no use'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = ckptd_json("verify", url, "--load", "loaders:load", exit_code=EXIT_FALLBACK)
    assert found["good"] == "15-g2"
    assert found["tried"][0]["findings"][-1]["message"].endswith("AssertionError: it is of no use")
    assert [item["notes"] for item in ckptd_json("ls", url)[:2]] == [["suspect"], ["verified"]]
    text = ckptd("verify", url, "15", "--load", "loaders:load").stdout
    assert "read again and proved, and loaded" in text
    undecided = ckptd("verify", url, "10", "--load", "loaders:nothing")
    assert undecided.exit_code == 1
    assert "was not begun" in undecided.stdout
    assert ckptd("verify", url, "--load", "nothing").exit_code == EXIT_USAGE


def test_verify_tells_nothing_good_from_nothing_there(url: str, tmp_path: Path) -> None:
    async def empty(run: Run) -> None:
        for key in await keys_of(run.backend, "checkpoints/"):
            await tamper(run.backend, key, lambda data: data.clear())

    change(url, empty)
    assert ckptd_json("verify", url, exit_code=EXIT_DAMAGED)["good"] is None
    assert ckptd_json("verify", tmp_path / "other", exit_code=EXIT_NONE)["error"] == "NoCheckpoint"
    change(f"file://{tmp_path}/fresh", lambda run: asyncio.sleep(0))
    assert ckptd("verify", tmp_path / "fresh").exit_code == EXIT_NONE


def test_export(url: str, tmp_path: Path) -> None:
    done = ckptd_json("export", url, "latest", tmp_path / "out")
    assert sorted(done["files"]) == sorted(os.listdir(tmp_path / "out"))
    again = ckptd("export", url, "latest", tmp_path / "out")
    assert again.exit_code == EXIT_USAGE
    assert "not an empty folder" in again.stderr
    assert "files in" in ckptd("export", url, "10", tmp_path / "second").stdout


WEIGHT, BIAS, EXP_AVG = 700 * 1000 * 4, 3 * 2, 5 * 7 * 8
"""Bytes of the tensors of a small state; the last one is the rank's own."""


def test_prune(url: str) -> None:
    planned = ckptd_json("prune", url, "--last", 1, "--dry-run")
    assert [item["checkpoint"] for item in planned["keep"]] == ["30-g2", "10-g1", "20-g1"]
    assert planned["keep"][1]["reason"] == "pinned"
    assert "off the line" in planned["keep"][2]["reason"]
    assert [item["checkpoint"] for item in planned["delete"]] == ["15-g2"]
    assert planned["done"] is None
    text = ckptd("prune", url, "--last", 1, "--dry-run").stdout
    assert all(reason in text for reason in ("one of the last 1", "pinned", "no rule keeps it"))
    assert [item["checkpoint"] for item in ckptd_json("ls", url)][:3] == ["30-g2", "15-g2", "10-g1"]

    assert ckptd("unpin", url, "10-g1").stdout == "unpinned 10-g1\n"
    assert ckptd_json("pin", url, "15", "--reason", "paper") == {"checkpoint": "15-g2", "mark": "pinned"}
    done = ckptd_json("prune", url, "--last", 1, "--beside", 0, "--grace", 0)
    assert sorted(done["done"]["deleted"]) == ["10-g1", "20-g1"]
    assert [item["checkpoint"] for item in ckptd_json("ls", url)] == ["30-g2", "15-g2", "40-g2"]


def test_prune_needs_a_rule_and_a_run_that_nobody_writes(url: str) -> None:
    assert ckptd("prune", url).exit_code == EXIT_USAGE
    assert ckptd_json("prune", url, "--last", 1, "--best", "loss", exit_code=EXIT_USAGE)["error"] == "ConfigError"
    assert ckptd_json("prune", url, "--last", 1, "--best", "a:x:1", exit_code=EXIT_USAGE)["error"] == "ConfigError"

    async def claim(run: Run) -> None:
        await run.claim_writer(launch="training", holder="node7")

    change(url, claim)
    refused = ckptd_json("prune", url, "--last", 1, exit_code=9)
    assert "node7" in refused["message"]
    assert ckptd_json("prune", url, "--last", 1, "--dry-run")["delete"] != []


def test_plan(url: str) -> None:
    alone = ckptd_json("plan", url, "latest", "--world", 1)
    assert (alone["checkpoint"], alone["world"], alone["layout"], alone["only"]) == ("30-g2", 1, "rows", None)
    size = WEIGHT + BIAS + EXP_AVG
    everything = {"bytes_wanted": size, "bytes_read": size, "amplification": 1.0, "requests": 1, "shards": 1}
    assert (alone["ranks"], alone["total"]) == ([{"rank": 0, **everything}], everything)
    found = ckptd_json("plan", url, "30", "--world", 4)
    # A single rank's own is the world's where other ranks restore it: rows 0-1, 2-3 and 4 of five.
    wanted = [WEIGHT // 4 + rows for rows in (2 + 2 * 56, 2 + 2 * 56, 2 + 56, 0)]
    assert [rank["bytes_wanted"] for rank in found["ranks"]] == wanted
    for rank in found["ranks"]:
        assert rank["bytes_wanted"] <= rank["bytes_read"] <= WEIGHT + BIAS + EXP_AVG
        assert rank["amplification"] == rank["bytes_read"] / rank["bytes_wanted"]
        assert rank["shards"] == 1
    sums = {key: sum(rank[key] for rank in found["ranks"]) for key in ("bytes_wanted", "bytes_read", "requests")}
    assert sums.items() <= found["total"].items()
    copies = ckptd_json("plan", url, "30", "--world", 3, "--layout", "replicated", "--only", "model")
    assert [rank["bytes_read"] for rank in copies["ranks"]] == [WEIGHT + BIAS] * 3
    bias = ckptd_json("plan", url, "30", "--world", 5, "--only", "model/bias")
    assert [rank["bytes_wanted"] for rank in bias["ranks"]] == [2, 2, 2, 0, 0]
    assert [rank["amplification"] for rank in bias["ranks"]] == [3.0, 3.0, 3.0, None, None]


def test_plan_in_words(url: str) -> None:
    lines = ckptd("plan", url, "latest", "--world", 2).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "0", "1", "total"]
    many = ckptd("plan", url, "latest", "--world", 50).stdout
    assert "10 ranks are left out; see them with --all" in many
    assert len(ckptd("plan", url, "latest", "--world", 50, "--all").stdout.splitlines()) == 52
    nothing = ckptd("plan", url, "latest", "--world", 2, "--only", "mod")
    assert nothing.exit_code == EXIT_USAGE
    assert "the parts are model, optimizer, step" in nothing.stderr
    assert ckptd("plan", url, "77", "--world", 2).exit_code == EXIT_NONE
    assert ckptd("plan", url, "latest", "--world", 0).exit_code == EXIT_USAGE


def test_doctor(url: str) -> None:
    found = ckptd_json("doctor", url, "--state-bytes", "1MiB", "--ranks", 2)
    levels = {finding["subject"]: finding["level"] for finding in found}
    assert levels["memory"] == levels["put and get"] == levels["conditional put"] == levels["clock"] == "ok"
    assert levels["room"] == levels["run"] == levels["daemon"] == "ok"
    huge = ckptd("doctor", url, "--state-bytes", "900TiB")
    assert huge.exit_code == 11
    assert "error    memory: 1 rank with 2 slots need" in huge.stdout
    assert "error    room: 5 checkpoints and the one being written need" in huge.stdout


def test_doctor_finds_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = ckptd_json("doctor", tmp_path / "file", exit_code=11)
    assert any(finding["level"] == "error" and finding["subject"] == "put and get" for finding in found)


def test_doctor_makes_no_folder(tmp_path: Path) -> None:
    found = ckptd_json("doctor", tmp_path / "misspelled" / "run", "--state-bytes", "1MiB")
    findings = {finding["subject"]: finding for finding in found}
    assert findings["root"]["level"] == "warning"
    assert "misspelled/run does not exist" in findings["root"]["message"]
    assert findings["put and get"]["level"] == findings["conditional put"]["level"] == findings["room"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_goes_on_after_a_storage_error(tmp_path: Path) -> None:
    """A run whose leases cannot be written: the other checks are made all the same, and say what they find."""
    (tmp_path / "leases").write_text("in the way")
    (tmp_path / "run.json").write_text("{}")
    findings = {finding["subject"]: finding["level"] for finding in ckptd_json("doctor", tmp_path, exit_code=11)}
    assert [findings[subject] for subject in ("put and get", "conditional put", "clock", "run")] == ["error"] * 4
    assert findings["room"] == "ok"


async def test_a_self_test_that_fails_is_a_finding_among_others(tmp_path: Path) -> None:
    class Unwell(Wrapper):
        async def self_test(self) -> list[Finding]:
            raise Unavailable("no answer")

        async def delete(self, keys: Iterable[str]) -> None:
            raise ExceptionGroup("not deleted", [AccessDenied("refused", key=key) for key in keys])

    backend = Unwell(open_backend(str(tmp_path)))
    findings = await check_store(backend, backend, Wishes(None, ranks=1, slots=1, keep=1))
    assert {finding.subject: finding.level for finding in findings} == {
        "self-test": "error",
        "clock": "error",
        "run": "ok",
        "room": "ok",
    }
    await backend.aclose()


def test_without_a_daemon(tmp_path: Path) -> None:
    for command in (["status"], ["drain", "--deadline", "1"]):
        done = ckptd(*command, "--socket", tmp_path / "none" / "daemon.sock")
        assert done.exit_code == EXIT_NO_DAEMON
        assert done.stderr.startswith("ckptd: DaemonError: no daemon at")
        assert "ckptd serve" in done.stderr
        assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [(["ls", "nosuchscheme://x"], None), (["ls", "/tmp", "--option", "x"], 2), (["ls", "/tmp", "--option", "x=1"], 2)],
)
def test_mistakes_are_one_line_and_a_hint(arguments: list[str], exit_code: int | None) -> None:
    done = ckptd(*arguments)
    assert done.exit_code == exit_code or (exit_code is None and done.exit_code > 0)
    assert done.stderr.startswith("ckptd: ")
    assert "Traceback" not in done.output


def test_secrets_are_not_shown() -> None:
    for option in ("secret_access_key=tops3cret", "nonsense=tops3cret"):
        done = ckptd("ls", "s3://bucket/x", "--option", option, "--option", "part_bytes=1")
        assert done.exit_code == EXIT_USAGE
        assert "tops3cret" not in done.output
    refused = ckptd("ls", "s3://me:tops3cret@bucket/x")
    assert refused.exit_code == EXIT_USAGE
    assert "tops3cret" not in refused.output


def test_progress_is_for_people_who_wait(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SHOWN_AFTER_SECONDS", 0.0)
    assert "verifying" not in ckptd("verify", url).stderr  # not a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "verifying" in ckptd("verify", url).stderr
    assert "verifying" not in ckptd("verify", url, "--json").stderr
    monkeypatch.setattr(output, "SHOWN_AFTER_SECONDS", 60.0)
    assert "verifying" not in ckptd("verify", url).stderr  # done before it is worth a bar


def test_serve_status_drain(private_folders: Path) -> None:
    socket = private_folders / "cli" / "d.sock"
    command = Path(sysconfig.get_path("scripts")) / "ckptd"
    budgets = ["--bandwidth", "500", "--memory-budget", "1024", "--io-priority", "idle"]
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 1
    with (private_folders / "cli.log").open("wb") as log:
        process = spawn([command, "serve", "--socket", socket, *budgets], env={"CKPTD_NICE": "1"}, output=log)
    try:
        wait_until(socket.exists, "the daemon's socket", deadline_seconds=20)
        status = ckptd_json("status", "--socket", socket)
        assert status["pid"] == process.pid
        said = ckptd("status", "--socket", socket).stdout
        assert f"process {process.pid} at {socket}" in said
        assert f"nice {nice}, I/O idle; writes 500.0 MiB/s; verification 64.0 MiB/s; memory 1.0 GiB" in said
        found = ckptd_json("doctor", "--socket", socket)
        assert any(finding["subject"] == "processors" for finding in found)
        assert any(f"process {process.pid}" in finding["message"] for finding in found)
        assert "drained" in ckptd("drain", "--deadline", 20, "--socket", socket).stdout
        assert process.wait(timeout=20) == 0
    finally:
        kill_group(process)
    assert ckptd("status", "--socket", socket).exit_code == EXIT_NO_DAEMON


def test_status_of_a_busy_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    save = {"version": "10-g1", "rank": 0, "stage": "writing", "bytes": 4 << 30, "bytes_done": 1 << 30}
    save |= {"bytes_per_second": 100 << 20, "progress_age_seconds": 0.25}
    session = {"run": "file:///r[1]", "rank": 0, "world": 2, "pid": 7}
    beat = {"step": 12, "phase": "step", "age_seconds": 1.5, "limit_seconds": 60.0}
    tier = {"run": "file:///r[1]", "tier": "s3://b/r", "state": "failing", "committed": "8-g1", "failures": 3}
    tier |= {"behind_steps": 40, "behind_seconds": 12.3, "copying": "9-g1", "bytes": 2 << 30, "bytes_done": 1 << 30}
    tier |= {"error": "Unavailable: no route [at all]"}
    retired = {"tier": "s3://b/r", "kept": 3, "deleted": 0, "waiting": 0, "failed": 2, "error": ""}
    daemon_commands.print_status(
        {
            "version": "1",
            "pid": 3,
            "socket": "/s",
            "uptime_seconds": 5.0,
            "draining": True,
            "arena_bytes": 8 << 30,
            "saves": {"count": 1, "listed": [save]},
            "sessions": {"count": 2, "listed": [session | {"beat": beat}, session | {"beat": None}]},
            "tiers": {"count": 1, "listed": [tier]},
            "retention": {"count": 2, "listed": [retired, retired | {"error": "AccessDenied: [no]"}]},
            "watch": {"limits_seconds": {}, "stalled": [], "dry_run": False, "counts": {}, "alerts": []},
            "committed": {"file:///r[1]": "9-g1"},
            "failures": [{"version": "8-g1", "rank": 1, "stage": "writing", "error": "disk full [really]"}],
        }
    )
    text = capsys.readouterr().out
    for part in (
        "1.0 GiB of 4.0 GiB",
        "100.0 MiB/s",
        "0.2 s ago",
        "draining",
        "file:///r[1]",
        "disk full [really]",
        "1.5 s ago",
        "40 steps, 12 s",
        "9-g1: 1.0 GiB of 2.0 GiB",
        "not copied to s3://b/r: Unavailable: no route [at all]",
        "retention at s3://b/r: 2 checkpoints could not be deleted",
        "retention at s3://b/r: AccessDenied: [no]",
    ):
        assert part in text, part


def test_storage_options() -> None:
    assert parse_storage_options(["a=1", "b=x=y", 'c="7"', "d=true", "e="]) == {
        "a": 1,
        "b": "x=y",
        "c": "7",
        "d": True,
        "e": "",
    }
    assert [parse_size(text) for text in ("4096", "1k", "1KiB", "1.5 GiB", "2tb", "7B")] == [
        4096,
        1000,
        1024,
        3 << 29,
        2 * 10**12,
        7,
    ]
    for wrong in ("", "x", "-1", "1x", "i"):
        with pytest.raises(ConfigError):
            parse_size(wrong)


def test_help_and_version() -> None:
    assert ckptd("--version").stdout.strip()
    text = ckptd("--help").stdout
    assert all(
        name in text for name in ("serve", "status", "ls", "show", "verify", "export", "drain", "doctor", "preflight")
    )
    assert "13 the newest is damaged" in ckptd("verify", "--help").stdout


def test_commands_on_s3(s3_server: S3Endpoint) -> None:
    url = s3_server.prefix()
    options = [part for key, value in s3_server.options.items() for part in ("--option", f'{key}="{value}"')]
    empty = ckptd("ls", url, *options)
    assert (empty.exit_code, "holds no run" in empty.stderr) == (EXIT_NONE, True)

    async def make() -> None:
        backend = open_backend(url, s3_server.options)
        await make_run(await Run.open(backend, create=True), [10])
        await backend.aclose()

    asyncio.run(make())
    assert [item["checkpoint"] for item in ckptd_json("ls", url, *options)] == ["10-g1"]
    assert ckptd_json("verify", url, *options)["good"] == "10-g1"
    levels = {finding["subject"]: finding["level"] for finding in ckptd_json("doctor", url, *options)}
    assert "error" not in levels.values()
    assert {"conditional put", "clock", "run"} <= levels.keys()
    wrong = ckptd("ls", url, *options, "--option", "secret_access_key=wr0ng")
    assert wrong.exit_code == AccessDenied.exit_code
    assert "AccessDenied" in wrong.stderr
    assert "wr0ng" not in wrong.output
    assert s3_server.secret_access_key not in wrong.output
