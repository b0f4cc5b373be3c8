"""``python -m bench.ranks``: what one daemon costs for 1, 2, 4 and 8 ranks, for each save and for each GB.

The ranks are processes of this machine with one daemon, and a state of their own each, so small that a save of it is
only what a save costs, and then so large that the bytes show. All save the same step at once and wait until it is
committed. The daemon's processor time is the kernel's count over all measured saves, its memory what it has beyond the
arena.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer

from bench.probes import machine
from bench.tables import table
from devtools.processes import kill_group, spawn, wait_until

RESULTS = Path(__file__).parent / "results" / "ranks.json"
ROOT = Path(__file__).parent.parent
WORLDS = (1, 2, 4, 8)
SMALL_BYTES, LARGE_BYTES = 64_000, 64_000_000
"""Of each rank."""
TENSORS = 16
WARM_UPS = 3
START_SECONDS = 120.0


class Daemon:
    """A daemon of its own; a context manager."""

    def __init__(self, place: Path) -> None:
        self.socket = place / "ckptd.sock"
        self._log = place / "log"

    def __enter__(self) -> Daemon:
        self._process = spawn([sys.executable, "-m", "ckptd.daemon", "--socket", self.socket, "--log-file", self._log])
        wait_until(self.socket.exists, "the daemon's socket", deadline_seconds=START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        kill_group(self._process)

    def cpu_seconds(self) -> float:
        """So far, with the processes that it has started."""
        daemon = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (daemon, *daemon.children(recursive=True))]
        return float(sum(found.user + found.system for found in times))

    def loop_cpu_seconds(self) -> float:
        """Of that, the thread of the event loop: what cannot be spread over threads."""
        pid = self._process.pid
        return float(sum(one.user_time + one.system_time for one in psutil.Process(pid).threads() if one.id == pid))

    def private_bytes(self) -> int:
        """Memory that is nobody else's; the arena is shared."""
        return int(psutil.Process(self._process.pid).memory_full_info().uss)


class Ranks:
    """The processes of one world; a context manager."""

    def __init__(self, world: int, size: int, daemon: Daemon, url: str) -> None:
        launch = uuid.uuid4().hex
        settings = [
            {"rank": rank, "world": world, "bytes": size, "socket": str(daemon.socket), "url": url, "launch": launch}
            for rank in range(world)
        ]
        self._argv = [[sys.executable, "-m", "bench.ranks_member", json.dumps(one)] for one in settings]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        for argv in self._argv:
            self._processes.append(
                subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        self._hear("ready")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            process.wait(START_SECONDS)

    def save(self, step: int) -> float:
        """All save a step; returns the seconds until all know that it is committed."""
        began = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
        self._hear("committed")
        return time.perf_counter() - began

    def _hear(self, word: str) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if (said := process.stdout.readline().strip()) != word:
                raise OSError(f"a rank said {said!r} and not {word!r}")


def measure(world: int, size: int, saves: int, place: Path) -> dict[str, Any]:
    """One world with states of one size: a daemon, ranks, warm-up and measured saves."""
    place.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        short = tempfile.TemporaryDirectory(prefix="ckptd-bench-")  # the name of a socket has little room
        daemon = stack.enter_context(Daemon(Path(stack.enter_context(short))))
        ranks = stack.enter_context(Ranks(world, size, daemon, f"file://{place / 'run'}"))
        for step in range(1, WARM_UPS + 1):
            ranks.save(step)
        before, loop_before = daemon.cpu_seconds(), daemon.loop_cpu_seconds()
        seconds = [ranks.save(step) for step in range(WARM_UPS + 1, WARM_UPS + saves + 1)]
        return {
            "ranks": world,
            "rank_bytes": size,
            "saves": saves,
            "daemon_cpu_seconds": daemon.cpu_seconds() - before,
            "loop_cpu_seconds": daemon.loop_cpu_seconds() - loop_before,
            "daemon_private_bytes": daemon.private_bytes(),
            "committed_seconds": seconds,
        }


def report(results: dict[str, Any]) -> str:
    """As Markdown."""
    rows: list[list[str]] = []
    found = {(one["ranks"], one["rank_bytes"]): one for one in results["worlds"]}
    for world in sorted({one["ranks"] for one in results["worlds"]}):
        small, large = (one for (ranks, _), one in sorted(found.items()) if ranks == world)
        each = [one["daemon_cpu_seconds"] / one["saves"] for one in (small, large)]
        loop = [one["loop_cpu_seconds"] / one["saves"] for one in (small, large)]
        gigabytes = world * (large["rank_bytes"] - small["rank_bytes"]) / 1e9
        rows.append(
            [
                str(world),
                f"{each[0] * 1e3:.1f}",
                f"{each[0] / world * 1e3:.1f}",
                f"{loop[0] / world * 1e3:.1f}",
                f"{(each[1] - each[0]) / gigabytes:.2f}",
                f"{(loop[1] - loop[0]) / gigabytes:.3f}",
                f"{large['daemon_private_bytes'] / 2**20:.0f}",
                f"{median(small['committed_seconds']) * 1e3:.0f}",
                f"{median(large['committed_seconds']) * 1e3:.0f}",
            ]
        )
    large_bytes = max(size for _, size in found)
    head = (
        "ranks",
        "daemon's CPU, ms a save",
        "ms a save and rank",
        "of that the loop",
        "CPU s/GB beyond that",
        "of that the loop",
        "memory beyond the arena, MiB",
        "committed, ms: small state",
        f"committed, ms: {large_bytes / 1e6:g} MB a rank",
    )
    return "\n".join([*table(head, rows), ""])


def main(
    saves: Annotated[int, typer.Option(help="Measured of each world and size.", min=1)] = 20,
    results: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS,
    folder: Annotated[Path, typer.Option(help="On the disk to write to.", resolve_path=True)] = Path("build/bench"),
) -> None:
    """The daemon's costs for 1 to 8 ranks; about three minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    worlds: list[dict[str, Any]] = []
    for world in WORLDS:
        for size in (SMALL_BYTES, LARGE_BYTES):
            with tempfile.TemporaryDirectory(prefix="r-", dir=folder, ignore_cleanup_errors=True) as place:
                worlds.append(measure(world, size, saves, Path(place).absolute()))
    found = {"format": "ckptd-bench-ranks/1", "machine": machine(), "worlds": worlds}
    results.write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))
    if results == RESULTS:
        from bench import docs  # which has to know this module

        docs.write()


if __name__ == "__main__":
    typer.run(main)
