"""``python -m tests.soak``: the ranks of a node on one daemon with slow stores, for as long as is wanted; what they
hold has to stay flat."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from ckptd.limits import MIB
from devtools.seaweedfs import SeaweedFS
from tests.chaos.children import Nursery
from tests.soak.soak import PLANS, Soak
from tests.soak.verdict import problems_of


def main() -> int:
    """The exit code: 1 where something is not as it has to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, once all train")
    parser.add_argument("--ranks", type=int, default=20, help=f"of {len(PLANS)} runs together")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="how often to look")
    parser.add_argument("--delay", type=float, default=0.2, metavar="SECONDS", help="of each request to a store")
    parser.add_argument("--bandwidth", type=float, default=40.0, metavar="MIB", help="a second, to all stores")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptd-soak-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder)
    slow = {"delay_seconds": options.delay, "bytes_per_second": int(options.bandwidth * MIB)}
    with (
        SeaweedFS(folder / "s3") as server,
        Nursery() as nursery,
        Soak(nursery, folder / "x", server, ranks=options.ranks, **slow) as soak,
    ):
        soak.begin()
        soak.go_on(options.seconds, options.every, partial(print, flush=True))
        soak.end()
    for line in soak.summary():
        print(line)
    problems = problems_of(soak)
    for problem in problems:
        print(f"NOT SO: {problem}")
    if not problems:
        shutil.rmtree(folder)
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
