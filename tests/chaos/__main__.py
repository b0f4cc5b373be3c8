"""``python -m tests.chaos``: stories of a run whose trainers and daemon are killed and stopped at every step of the
protocol and at any instant, one seed after the other.

A story that broke a promise is told again by the command that is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
import traceback
from pathlib import Path

from devtools.seaweedfs import S3Endpoint, SeaweedFS
from tests.chaos.children import Nursery
from tests.chaos.story import Story, Tally

KILLS_A_STORY = 12
S3_EVERY = 5
"""Each fifth seed is a run on S3."""


def main() -> int:
    """The exit code: how many stories broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--kills", type=int, default=1000, metavar="M", help="how many, at least")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no story after so long")
    options = parser.parse_args()
    began = time.monotonic()
    tally = Tally()
    broken = 0
    folder = Path(tempfile.mkdtemp(prefix="ckptd-chaos-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder)
    seed = options.seed
    with contextlib.ExitStack() as stack:
        server: S3Endpoint | None = None
        nursery = stack.enter_context(Nursery())
        while tally.kills < options.kills and time.monotonic() - began < options.minutes * 60:
            if seed % S3_EVERY == S3_EVERY - 1 and server is None:
                server = stack.enter_context(SeaweedFS(folder / "s3"))
            story = Story(seed, nursery, folder / str(seed), server if seed % S3_EVERY == S3_EVERY - 1 else None)
            try:
                story.tell(min(KILLS_A_STORY, options.kills))
                shutil.rmtree(folder / str(seed))
            except Exception:
                broken += 1
                traceback.print_exc()
                print(f'again: make chaos ARGS="--seed {seed} --kills {min(KILLS_A_STORY, options.kills)}"', flush=True)
            tally.add(story.tally)
            print(f"seed {seed}: {_in_words(tally)}, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
            seed += 1
    for point, count in sorted(tally.points.items()):
        print(f"{count:5} {point}")
    if not broken:
        shutil.rmtree(folder)
    return min(broken, 100)


def _in_words(tally: Tally) -> str:
    return (
        f"{tally.stories} stories, {tally.kills} kills, {tally.stops} stops, {sum(tally.points.values())} at "
        f"{len(tally.points)} named points, {tally.restores} restores, {tally.checkpoints} checkpoints"
    )


if __name__ == "__main__":
    raise SystemExit(main())
