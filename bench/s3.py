"""``python -m bench.s3``: memory to S3 and back, against a server that keeps nothing and against a real one.

All ways send and read the same memory in parts of one size with as many requests at once, in this process, in turn,
round after round and every other round backwards. What was sent to the sink is counted there; what was sent to the real
server is read back by another way and compared; what is read is verified part by part as it arrives.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench.probes import MemoryPeak, machine
from bench.s3_sink import PATTERN_BYTES, STATISTICS_PATH, pattern
from bench.s3_ways import AT_ONCE, PART_BYTES, WAYS, Boto3PartsTuned, Way, timed
from bench.tables import table
from ckptd.format.digests import digest
from devtools.processes import kill_group, spawn, wait_until
from devtools.seaweedfs import S3Endpoint, SeaweedFS, weed

RESULTS = Path(__file__).parent / "results" / "s3.json"
ROOT = Path(__file__).parent.parent
FLOOR, OURS = "bare sockets", "ckptd"
OWN_CLIENT = "weed filer.copy"
"""The real server's own fastest client: past S3, from a file to its filer."""

Samples = dict[str, dict[str, Any]]


def content(size: int) -> memoryview:
    """What is sent and what is to come back."""
    repeated = bytearray(pattern() * -(-size // PATTERN_BYTES))
    return memoryview(repeated)[:size]


class Verifier:
    """Holds what arrives against digests, as a restore does."""

    def __init__(self, expected: memoryview) -> None:
        self._digests = {
            start: digest(expected[start : start + PART_BYTES]) for start in range(0, len(expected), PART_BYTES)
        }

    def __call__(self, start: int, part: memoryview) -> None:
        if digest(part) != self._digests[start]:
            raise ValueError(f"the part at byte {start} is not what was sent")


class SinkServer(S3Endpoint):
    """The sink in a process of its own; a context manager."""

    def __init__(self, object_bytes: int, log: Path) -> None:
        super().__init__("", "nobody", uuid.uuid4().hex, bucket="b")
        self._argv = [sys.executable, "-m", "bench.s3_sink", str(object_bytes)]
        self._log = log

    def __enter__(self) -> SinkServer:
        with self._log.open("wb") as output:
            self._process = spawn(self._argv, cwd=ROOT, output=output)
        wait_until(lambda: self._log.read_text().endswith("\n"), "the sink's port", deadline_seconds=30)
        self.endpoint_url = f"http://127.0.0.1:{int(self._log.read_text())}"
        return self

    def __exit__(self, *_: object) -> None:
        kill_group(self._process)

    def statistics(self) -> dict[str, int]:
        """Bytes, bodies, and bodies with a checksum so far."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.endpoint_url + STATISTICS_PATH) as answer:
            found: dict[str, int] = json.load(answer)
        return found


def measure(ways: dict[str, Way], memory: memoryview, rounds: int, kinds: Sequence[str]) -> dict[str, Samples]:
    """Each way once to warm up, then in turn. Seconds and processor seconds, by kind and way."""
    found: dict[str, Samples] = {kind: {} for kind in kinds}
    out, verify = memoryview(bytearray(len(memory))), Verifier(memory)
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            way = ways[name]
            for kind in kinds:
                if kind == "upload":
                    seconds, cpu = timed(partial(way.upload, "object", memory))
                else:
                    out[:] = bytes(len(out))
                    seconds, cpu = timed(partial(way.download, "object", out, verify))
                if number:
                    sample = found[kind].setdefault(name, {"seconds": [], "cpu": []})
                    sample["seconds"].append(seconds)
                    sample["cpu"].append(cpu)
    return found


def measure_memory(ways: dict[str, Way], memory: memoryview) -> dict[str, int]:
    """How many bytes an upload takes beyond the memory that is sent; untimed."""
    found: dict[str, int] = {}
    for name, way in ways.items():
        with MemoryPeak() as watch:
            before = watch.peak
            way.upload("object", memory)
        found[name] = max(watch.peak.private - before.private, 0)
    return found


def against_sink(size: int, rounds: int, place: Path) -> dict[str, Any]:
    """Uploads, downloads and memory. Raises where bytes or checksums are missing at the sink."""
    memory = content(size)
    with SinkServer(size, place / "sink.log") as server:
        ways = _open(WAYS, server)
        try:
            found: dict[str, Any] = measure(ways, memory, rounds, ("upload", "download"))
            found["memory"] = measure_memory(ways, memory)
            before = server.statistics()
            ways[OURS].upload("object", memory)
            after = server.statistics()
        finally:
            _close(ways)
    parts = -(-size // PART_BYTES)
    if after["bytes"] - before["bytes"] != size or after["checksums"] - before["checksums"] != parts:
        raise ValueError(f"the sink got {after} after {before}: not {size} bytes in {parts} parts with a checksum each")
    return found


def against_server(size: int, rounds: int, place: Path) -> dict[str, Any]:
    """Uploads to SeaweedFS; each object is read back. Its own client copies a file of the same bytes."""
    memory = content(size)
    names = [name for name in WAYS if name != FLOOR]
    with SeaweedFS(place / "server") as server:
        ways = _open({name: WAYS[name] for name in names}, server)
        ways[OWN_CLIENT] = _WeedCopy(server, place, memory)
        try:
            found: dict[str, Any] = measure(ways, memory, rounds, ("upload",))
            reader = Boto3PartsTuned(server, "")
            reader.open()
            out, verify = memoryview(bytearray(size)), Verifier(memory)
            for name in names:
                reader.run = ways[name].run
                reader.download("object", out, verify)
            reader.close()
        finally:
            _close(ways)
    return found


class _WeedCopy(Way):
    def __init__(self, server: SeaweedFS, place: Path, memory: memoryview) -> None:
        super().__init__(server, "")
        self._filer = server.filer_url
        self._file = place / "object"
        self._file.write_bytes(memory)

    def upload(self, key: str, view: memoryview) -> None:
        target = f"{self._filer}/copied/{random.getrandbits(64):x}/"
        argv: list[str | Path] = [
            weed(),
            "filer.copy",
            f"-concurrentChunks={AT_ONCE}",
            f"-maxMB={PART_BYTES >> 20}",
            self._file,
            target,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{OWN_CLIENT}: {done.stderr.strip().splitlines()[-1:]}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(target + self._file.name, method="HEAD")
        ) as answer:
            if int(answer.headers["Content-Length"]) != len(view):
                raise OSError(f"{OWN_CLIENT} has not copied all")

    def download(self, key: str, out: memoryview, verify: Any) -> None:
        raise NotImplementedError


def _open(ways: dict[str, type[Way]], server: S3Endpoint) -> dict[str, Way]:
    found: dict[str, Way] = {name: kind(server, f"way{number}") for number, (name, kind) in enumerate(ways.items())}
    for way in found.values():
        way.open()
    return found


def _close(ways: dict[str, Way]) -> None:
    for way in ways.values():
        way.close()


def report(results: dict[str, Any]) -> str:
    """As Markdown: GB a second, processor seconds a GB, and ckptd's ratio to the others within the run."""
    size = results["bytes"]
    lines = [
        f"{size / 1e9:.3g} GB in parts of {PART_BYTES >> 20} MiB, {AT_ONCE} requests at once; medians of "
        f"{results['rounds']}. Client and server share {results['machine']['cores']} cores.",
        "",
    ]
    for title, kind in (("upload to the null sink", "upload"), ("download from the null sink, verified", "download")):
        memory = results["sink"]["memory"] if kind == "upload" else None
        lines += [*_rows(title, results["sink"][kind], size, memory), ""]
    return "\n".join([*lines, *_rows("upload to SeaweedFS", results["server"]["upload"], size, None), ""])


def _rows(title: str, samples: Samples, size: int, memory: dict[str, int] | None) -> list[str]:
    ours = median(samples[OURS]["seconds"])
    rows = [
        [
            name,
            f"{size / 1e9 / median(sample['seconds']):.2f}",
            f"{median(sample['seconds']) / ours:.2f}",
            "" if name == OWN_CLIENT else f"{median(sample['cpu']) / size * 1e9:.2f}",
            *([] if memory is None else [f"{memory[name] / 2**20:.0f}"]),
        ]
        for name, sample in samples.items()
    ]
    head = [title, "GB/s", "time / ckptd's", "client's CPU s/GB", *([] if memory is None else ["memory, MiB"])]
    return table(head, rows)


def main(
    megabytes: Annotated[int, typer.Option(help="Moved each time.")] = 512,
    rounds: Annotated[int, typer.Option(help="Measured of each way.", min=1)] = 5,
    results: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS,
) -> None:
    """Uploads and downloads, ckptd against boto3 and bare sockets; about five minutes."""
    size = megabytes * 10**6
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as place:
        found = {
            "format": "ckptd-bench-s3/1",
            "bytes": size,
            "rounds": rounds,
            "machine": machine(),
            "sink": against_sink(size, rounds, Path(place)),
            "server": against_server(size, rounds, Path(place)),
        }
        shutil.rmtree(Path(place) / "server", ignore_errors=True)
    results.write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))
    if results == RESULTS:
        from bench import docs  # which has to know this module

        docs.write()


if __name__ == "__main__":
    typer.run(main)
