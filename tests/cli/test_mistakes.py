"""What people get wrong at the command line is said in one line, with what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.cli.daemon_call import call
from ckptd.errors import AccessDenied
from ckptd.wire.messages import GetStatus, Status
from tests.cli.test_commands import EXIT_NO_DAEMON, EXIT_USAGE, ckptd, ckptd_json, url

__all__ = ["url"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-node", "two", "train.py"], "--nproc-per-node two: "),
        (["--nnodes", "a:b", "train.py"], "--nnodes a:b: "),
        (["--nproc", "2", "train.py"], "--nproc may be short for --nproc-per-node\n"),
        (["--max-restarts", "many", "train.py"], "--max-restarts/--max_restarts: invalid int value: 'many'"),
    ],
)
def test_run_refuses_in_one_line(arguments: list[str], said: str) -> None:
    done = ckptd("run", *arguments)
    assert done.exit_code == EXIT_USAGE, done.output
    first, second = done.stderr.splitlines()
    assert first.startswith("ckptd: ConfigError: ckptd run: ")
    assert said in first + "\n"
    assert second


def test_no_socket_is_no_daemon_whatever_folder_it_would_lie_in() -> None:
    done = ckptd("status", "--socket", "/nope.sock")
    assert done.exit_code == EXIT_NO_DAEMON
    assert done.stderr.startswith("ckptd: DaemonError: no daemon at /nope.sock: No such file")


def test_a_socket_of_another_user_says_nothing_of_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object, *_: object, **__: object) -> None:  # root, as whom tests may run, is denied nothing
        raise PermissionError(13, "Permission denied", str(path))

    socket = tmp_path / "daemon.sock"
    with monkeypatch.context() as patched:
        patched.setattr("ckptd.cli.daemon_call.os.lstat", denied)
        with pytest.raises(AccessDenied, match=r"belongs to uid .* closed to uid") as refused:
            call(socket, GetStatus(), Status, seconds=1)
    assert "nothing is being written" not in str(refused.value)


def test_doctor_of_a_place_without_a_folder_above_it() -> None:
    done = ckptd("doctor", "/no-such-folder/run")
    assert done.exit_code == 11
    assert "/no-such-folder/run does not exist, nor does any folder that it would lie in" in done.stdout
    assert "file:///" not in done.output


def test_doctor_says_what_helps_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    options = ("--option", "endpoint_url=http://127.0.0.1:9", "--option", "region=us-east-1")
    done = ckptd("doctor", "s3://bucket/run", *options)
    assert done.stdout.count("no usable credentials") > 1
    assert done.stdout.count("AWS_ACCESS_KEY_ID") == 1


def test_prune_by_one_rule_keeps_the_newest_as_well(url: str) -> None:
    """Rules add up: the best one is kept, and the newest in any case."""
    plan = ckptd_json("prune", url, "--best", "loss:max:1", "--dry-run")
    kept = {item["checkpoint"]: item["reason"] for item in plan["keep"]}
    assert kept["30-g2"] == "one of the last 1"
    assert ckptd_json("prune", url, "--every-steps", 1000, "--dry-run")["keep"] == [
        item for item in plan["keep"] if not item["reason"].startswith("one of the 1 best")
    ]
    refused = ckptd_json("prune", url, exit_code=EXIT_USAGE)
    assert "--best" in refused["hint"]
