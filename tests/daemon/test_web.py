"""What a daemon tells Prometheus and probes, and alerts by web."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ckptd.daemon.owner import Seat
from ckptd.daemon.save import Failure
from ckptd.daemon.watch.alerts import Alert, Alerts
from ckptd.daemon.watch.sparing import Sparing
from ckptd.daemon.watch.webhook import Webhook
from ckptd.daemon.web import parse_address
from ckptd.errors import ConfigError
from ckptd.format.keys import Version
from ckptd.wire.messages import Committed, Failed
from devtools.processes import wait_until
from tests.daemon.trainer import DaemonProcess, Member, daemon_at, trainer

ROOT = Path(__file__).parents[2]
SIZE = 900_000


def get(daemon: DaemonProcess, path: str) -> tuple[int, str]:
    line = re.compile(r"metrics at (http://[^ ]+)/metrics")
    wait_until(lambda: line.search(daemon.log.read_text()) is not None, "the web server", deadline_seconds=20)
    found = line.search(daemon.log.read_text())
    assert found is not None
    try:
        with urllib.request.urlopen(found[1] + path, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(daemon: DaemonProcess) -> dict[tuple[str, str], float]:
    """Name and run, or else the first label → value."""
    status, text = get(daemon, "/metrics")
    assert status == 200
    return {
        (sample.name, sample.labels.get("run") or next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_and_probes_of_a_daemon_whose_store_is_slow(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options={"part_bytes": 65536})
    with (
        daemon_at(socket_path, "--bandwidth", "1", "--metrics", "127.0.0.1:0") as daemon,
        trainer(daemon.socket, member) as session,
    ):
        session.watched().step(41, loss=0.5)
        session.save(40, SIZE)
        session.wait_for_stage(Version(40, 1), "write")
        assert get(daemon, "/healthz") == (200, "alive\n")
        assert get(daemon, "/readyz") == (200, "ready\n")
        assert samples(daemon)["ckptd_saves_under_way", "write"] == 1
        assert isinstance(session.outcome(40), Committed)
        found = samples(daemon)
        assert found["ckptd_saves_total", "committed"] == 1
        assert found["ckptd_saves_total", "failed"] == 0
        assert found["ckptd_saved_bytes_total", ""] == len(member.content(40, SIZE).shard)
        assert found["ckptd_save_seconds_total", "write"] > 0
        assert found["ckptd_last_commit_step", tmp_run] == 40
        assert found["ckptd_last_commit_age_seconds", tmp_run] >= 0
        assert found["ckptd_slots", "durable"] == 1
        assert found["ckptd_trainer_step", tmp_run] == 41
        assert found["ckptd_trainer_loss", tmp_run] == 0.5
        assert found["ckptd_starts_total", tmp_run] == 1
        assert get(daemon, "/other")[0] == 404
        session.save(41, SIZE)
        session.wait_for_stage(Version(41, 1), "write")
        daemon.process.terminate()
        wait_until(lambda: session.status()["draining"], "the drain", deadline_seconds=20)
        assert get(daemon, "/readyz") == (503, "draining\n")
        assert get(daemon, "/healthz")[0] == 200
        assert daemon.process.wait(30) == 0


def test_the_rules_for_alerts_ask_for_metrics_that_there_are(socket_path: Path) -> None:
    (group,) = yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yaml").read_text())["groups"]
    asked = {name for rule in group["rules"] for name in re.findall(r"ckptd_\w+", rule["expr"])}
    with daemon_at(socket_path, "--metrics", "127.0.0.1:0") as daemon:
        text = get(daemon, "/metrics")[1]
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert asked <= there
    assert asked


@pytest.mark.parametrize("text", ["9464", "host", "host:port", "http://h:1", "h:1/x", "h:99999", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no host:port"):
        parse_address(text)


def test_addresses_are_understood() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:0") == ("::1", 0)


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Fails at first, as receivers do, and then takes what comes."""
    heard: list[dict[str, Any]] = []
    failures = iter([500, 503])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = next(failures, 204)
            if status == 204:
                heard.append(json.loads(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook?token=secret", heard
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_alert_reaches_a_receiver_that_fails_at_first(
    receiver: tuple[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.daemon.watch.webhook.BACKOFF_SECONDS", 0.05)
    url, heard = receiver
    webhook = Webhook(url)
    webhook(Alert(kind="hang", level="error", message="no progress", run="r", launch="l", generation=1, ranks=(0,)))
    webhook.close(20)
    assert [(alert["source"], alert["kind"], alert["ranks"]) for alert in heard] == [("ckptd", "hang", [0])]
    assert "secret" not in caplog.text


def test_a_receiver_that_never_answers_is_given_up_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.daemon.watch.webhook.BACKOFF_SECONDS", 0.01)
    webhook = Webhook("http://127.0.0.1:1/secret")
    webhook(Alert(kind="hang", level="error", message="no progress", run="r", launch="l", generation=1, ranks=(0,)))
    webhook.close(20)
    assert "an alert, hang, did not reach 127.0.0.1" in caplog.text
    assert "secret" not in caplog.text


def test_what_is_no_web_address_is_refused() -> None:
    with pytest.raises(ConfigError):
        Webhook("file:///etc/passwd")


def of_the_run(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is told of a machine that others keep busy."""
    return [alert for alert in heard if alert["kind"] != "machine"]


def test_people_hear_once_of_saves_that_fail_and_of_restarts(
    socket_path: Path, tmp_path: Path, receiver: tuple[str, list[dict[str, Any]]]
) -> None:
    url, heard = receiver
    root = tmp_path / "run"
    member = Member(f"file://{root}")
    with daemon_at(socket_path, "--webhook", url) as daemon:
        with trainer(daemon.socket, member) as session:
            root.rename(tmp_path / "elsewhere")
            root.write_text("a file where a folder should be")
            for step in (1, 2, 3):
                session.save(step)
                assert isinstance(session.outcome(step), Failed)
        root.unlink()
        (tmp_path / "elsewhere").rename(root)
        for step, launch in ((4, "test#1"), (5, "test#2")):
            with trainer(daemon.socket, replace(member, launch=launch)) as session:
                session.save(step)
                assert isinstance(session.outcome(step), Committed)
        wait_until(lambda: len(of_the_run(heard)) >= 2, "two alerts", deadline_seconds=40)
        assert daemon.terminate() == 0
    failed, restarted = of_the_run(heard)
    assert (failed["kind"], failed["level"], failed["run"], failed["ranks"]) == ("failed", "error", member.url, [0])
    assert failed["message"].startswith("step 1 of rank 0 failed (write): ")
    assert (restarted["kind"], restarted["launch"], restarted["run"]) == ("restarted", "test#1", member.url)


def test_what_comes_again_and_again_is_told_with_how_often() -> None:
    alerts, clock = Alerts(), iter([0.0, 10.0, 20.0, 30.0, 310.0, 2000.0])
    sparing = Sparing(alerts, quiet_seconds=300.0, clock=lambda: next(clock))
    seat = Seat("file:///run", 3)
    for step, stage in enumerate(["write", "write", "commit", "write", "write", "write"], 1):
        sparing.failed(Failure(0.0, seat, Version(step, 1), stage, "no room"))  # type: ignore[arg-type]
    assert [alert.message for alert in alerts.recent] == [
        "step 1 of rank 3 failed (write): no room",
        "step 3 of rank 3 failed (commit): no room",
        "step 5 of rank 3 failed (write): no room; 2 more since the last alert of it",
        "step 6 of rank 3 failed (write): no room",
    ]
