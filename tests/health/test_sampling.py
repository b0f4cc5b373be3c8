"""What a daemon notices about its machine: GPUs by recordings of faults, the host by files like the kernel's and by
faults that can be had: a full disk, a stopped process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from ckptd.cli.daemon_call import call
from ckptd.health import gpu
from ckptd.health.gpu import Gpus, Nvml
from ckptd.health.host import Host
from ckptd.health.monitor import STOPPED_SECONDS, Monitor
from ckptd.health.sightings import Sightings
from ckptd.limits import MIB, SIGHTINGS_MAX
from ckptd.storage import Finding
from ckptd.wire.messages import GetStatus, Status
from devtools.processes import wait_until
from tests.daemon.trainer import daemon_at
from tests.health.replayed_nvml import ReplayedNvml


def looks(name: str, count: int) -> list[list[tuple[int, str, str]]]:
    """Of so many looks at a recording: GPU, level and subject of each finding."""
    nvml = ReplayedNvml(name)
    gpus = Gpus(nvml)
    places = {found.place: found.index for found in gpus.all}
    found = []
    for _ in range(count):
        found.append([(places.get(place, -1), seen.level, seen.subject) for place, seen in gpus.look()])
        nvml.advance()
    gpus.close()
    assert not nvml.open
    return found


def test_nothing_is_said_of_gpus_that_are_well() -> None:
    assert looks("well", 3) == [[], [], []]


def test_a_memory_error_is_seen_once_and_its_row_until_reset() -> None:
    first, second, third = looks("memory_error", 3)
    assert first == []
    xids = [(1, "error", "XID 48"), (1, "error", "XID 63"), (1, "error", "XID 94")]
    assert second == [*xids, (1, "error", "ECC"), (1, "warning", "row remapping")]
    assert third == [(1, "error", "row remapping")]


def test_a_gpu_off_the_bus_is_named_and_the_others_are_still_looked_at() -> None:
    first, second, third = looks("off_the_bus", 3)
    assert (first, second, third) == ([], [(1, "error", "XID 79"), (1, "error", "lost")], [(1, "error", "lost")])


def test_heat_lasts_while_it_lasts() -> None:
    hot = [(1, "warning", "throttled")]
    assert looks("hot", 4) == [[], hot, hot, []]


def test_faults_of_programs_are_warnings() -> None:
    assert looks("program", 2)[1] == [(0, "warning", "XID 13"), (0, "warning", "XID 13"), (0, "warning", "XID 43")]


def test_a_card_that_knows_little_and_one_that_cannot_be_opened() -> None:
    gpus = Gpus(ReplayedNvml("old_card"))
    assert [(place, seen.level) for place, seen in gpus.look()] == [("GPU 1", "error")]
    assert gpus.all[0].figures["utilization_percent"] == 50
    assert gpus.all[0].figures["temperature_celsius"] is None


def test_the_recordings_answer_what_the_real_module_does() -> None:
    names = [name for name in vars(Nvml) if name.startswith("nvml")]
    assert len(names) > 10
    assert [name for name in names if not hasattr(pynvml, name) or not hasattr(ReplayedNvml, name)] == []
    assert (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED) == (gpu.VOLATILE_ECC, gpu.UNCORRECTED)
    assert (pynvml.nvmlEventTypeXidCriticalError, pynvml.NVML_TEMPERATURE_GPU) == (gpu.XID_EVENT, gpu.TEMPERATURE_GPU)
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED) == gpu.LOST
    assert pynvml.NVML_ERROR_TIMEOUT == gpu.TIMEOUT
    bits = [name for name in dir(pynvml) if name.startswith("nvmlClocksEventReason") or "Slowdown" in name]
    assert set(gpu.SLOWED) <= {getattr(pynvml, name) for name in bits}


# The host


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """Files like those of a kernel that is well."""
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)
    (proc / "cgroup").mkdir()
    for name, text in {
        "pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00\n",
        "loadavg": "0.50 0.40 0.30 1/100 4711\n",
        "vmstat": "nr_free_pages 100\noom_kill 7\n",
        "cgroup/memory.events": "low 0\noom 2\noom_kill 2\n",
    }.items():
        (proc / name).write_text(text)
    return proc


def subjects(host: Host) -> list[tuple[str, str]]:
    return [(found.level, found.subject) for found in host.look()]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("pressure/memory", "some avg10=90.00\nfull avg10=12.50 avg60=3.00\n", ("warning", "memory pressure")),
        ("cgroup/memory.pressure", "some avg10=90.00\nfull avg10=55.50\n", ("error", "memory pressure")),
        ("loadavg", "1.00 100000.00 3.00 1/100 4711\n", ("warning", "load")),
        ("vmstat", "nr_free_pages 100\noom_kill 9\n", ("error", "OOM kill in this machine")),
        ("cgroup/memory.events", "oom 3\noom_kill 3\n", ("error", "OOM kill in this cgroup")),
    ],
)
def test_what_the_kernel_says(name: str, text: str, expected: tuple[str, str], kernel: Path) -> None:
    host = Host(kernel, cgroup=kernel / "cgroup")
    assert subjects(host) == []
    (kernel / name).write_text(text)
    assert subjects(host) == [expected]
    if "OOM" in expected[1]:
        assert subjects(host) == [], "it was told already"


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path, cgroup=tmp_path)
    assert subjects(host) == []
    assert host.figures == {"memory_pressure_percent": None, "oom_kills": None}


def test_a_clock_that_jumps(kernel: Path) -> None:
    wall = [1e9]
    host = Host(kernel, cgroup=kernel, wall=lambda: wall[0], monotonic=lambda: 0.0)
    wall[0] += 0.5
    assert subjects(host) == []
    wall[0] -= 3600
    assert [found.message for found in host.look()] == ["the clock was set by -3600.0 s, or the machine was suspended"]
    assert subjects(host) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk(small_disk: Path, kernel: Path) -> None:
    host = Host(kernel, cgroup=kernel)
    host.folders = frozenset([small_disk, small_disk / "not yet"])
    assert subjects(host) == []
    with pytest.raises(OSError, match="No space"):
        (small_disk / "big").write_bytes(bytes(2 * MIB))
    assert subjects(host) == [("error", f"disk of {small_disk}")]


# The daemon's record


def test_sightings_are_counted_and_bounded() -> None:
    found = Sightings()
    for moment in range(3):
        found.note("host", Finding("warning", "load", f"load {moment}"), 100.0 + moment)
    (seen,) = found.latest()
    assert (seen.times, seen.first_unix_seconds, seen.last_unix_seconds) == (3, 100.0, 102.0)
    assert seen.finding.message == "load 2"
    assert found.latest(since_unix_seconds=102.5) == ()
    for number in range(SIGHTINGS_MAX):
        found.note("host", Finding("error", f"XID {number}", "…"), 200.0 + number)
    assert len(found.latest()) == SIGHTINGS_MAX
    assert found.latest()[0].finding.subject == f"XID {SIGHTINGS_MAX - 1}"
    assert "load" not in {kept.finding.subject for kept in found.latest()}
    assert found.latest()[0].plain()["place"] == "host"


def test_a_driver_that_hangs_is_a_finding_and_holds_up_nobody(kernel: Path) -> None:
    now, entered, leave = [0.0], threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        leave.wait()

    host = Host(kernel, cgroup=kernel)
    monitor = Monitor(1.0, host=host, open_gpus=hang, monotonic=lambda: now[0])
    monitor.start()
    try:
        assert entered.wait(20)
        assert monitor.latest() == ()
        now[0] = 1000.0
        (stuck,) = monitor.latest()
        assert stuck.finding.message == "looking at the GPUs has not ended for 1000 s"
        assert monitor.status(1)["findings"]["count"] == 1
    finally:
        leave.set()
        monitor.close()


def test_missing_bindings_are_said_where_there_are_gpus(kernel: Path) -> None:
    def missing() -> None:
        raise ImportError("pynvml")

    monitor = Monitor(0, host=Host(kernel, cgroup=kernel), open_gpus=missing)
    monitor.look()
    monitor.look()
    (seen,) = monitor.latest()
    assert (seen.finding.subject, seen.times) == ("GPUs", 1)


def test_a_monitor_tells_of_gpus(kernel: Path) -> None:
    nvml = ReplayedNvml("off_the_bus")
    monitor = Monitor(0, host=Host(kernel, cgroup=kernel), open_gpus=lambda: Gpus(nvml))
    for _ in range(3):
        monitor.look()
        nvml.advance()
    lost, xid = monitor.latest()
    assert (lost.finding.subject, lost.times, xid.finding.subject, xid.times) == ("lost", 2, "XID 79", 1)
    assert xid.place.startswith("GPU 1 (GPU-5f1c0a7e-bbbb")
    status: dict[str, Any] = monitor.status(1)
    assert [len(status["gpus"]), status["gpus"][0]["utilization_percent"]] == [1, 97]
    assert status["findings"]["count"] == 2
    assert json.loads(json.dumps(status)) == status


def test_a_daemon_tells_of_gpus_and_that_it_was_stopped(
    private_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE_MODULE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])
    monkeypatch.setenv("PYTHONPATH", path)
    with daemon_at(private_folders / "health" / "d.sock", "--health-every", "0.1") as daemon:

        def found() -> dict[str, Any]:
            health = call(daemon.socket, GetStatus(), Status, seconds=20).status["health"]
            return {seen["subject"]: seen for seen in health["findings"]["listed"]}

        wait_until(lambda: "throttled" in found(), "what the driver says", deadline_seconds=20)
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS + 0.5)
        daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: "stood still" in found(), "what the stop left", deadline_seconds=20)
        assert found()["throttled"]["times"] >= 1

        def told() -> list[tuple[str, str]]:
            alerts = call(daemon.socket, GetStatus(), Status, seconds=20).status["watch"]["alerts"]
            return [(alert["kind"], alert["message"].split(": ")[1]) for alert in alerts]

        wait_until(lambda: ("machine", "stood still") in told(), "people are told", deadline_seconds=20)
        assert told().count(("machine", "throttled")) == 1, "once, however often it is seen"


FAKE_MODULE = """
from tests.health.replayed_nvml import ReplayedNvml

replayed = ReplayedNvml("hot")
replayed.advance()
globals().update({name: getattr(replayed, name) for name in dir(replayed) if name.startswith(("nvml", "NVML"))})
"""
