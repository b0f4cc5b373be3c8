"""``python -m tests.chaos``: stories of a run whose trainers and daemon are killed and stopped at every step of the
protocol and at any instant, one seed after the other.

A story that broke a promise is told again by the command that is printed. With ``--log``, each seed that was told is a
line in a file, and no seed of that file is told again: a run that was cut short goes on by the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devtools.seaweedfs import S3Endpoint, SeaweedFS
from tests.chaos.cast import Tally
from tests.chaos.children import Nursery
from tests.chaos.matrix import Matrix, all_cells
from tests.chaos.story import Story

KILLS_A_STORY = 12
S3_EVERY = 5
"""Each fifth seed is a run on S3."""


def main() -> int:
    """The exit code: how many stories broke a promise."""
    options = _options()
    began = time.monotonic()
    tally, told = Tally(), _told(options.log)
    broken = 0
    for line in told.values():
        tally.add(_tally_of(line))
    with _Tellers() as tellers:
        seed = options.seed
        while tally.kills < options.kills and time.monotonic() - began < options.minutes * 60:
            if seed not in told:
                began_seconds = time.monotonic()
                story, failure = tellers.tell(seed, options)
                tally.add(story)
                broken += failure
                line = {**vars(story), "passed": [], "seed": seed, "broken": failure}
                _note(options.log, {**line, "seconds": round(time.monotonic() - began_seconds, 1)})
                print(f"seed {seed}: {_in_words(tally)}, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
            seed += 1
    for point, count in sorted(tally.points.items()):
        print(f"{count:5} {point}")
    return min(broken, 100)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--kills", type=int, default=1000, metavar="M", help="how many, at least")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no story after so long")
    parser.add_argument("--matrix", action="store_true", help="every step for every victim, in each seed's order")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what was told, and need not be told again")
    return parser.parse_args()


class _Tellers:
    """What stories share. A context manager."""

    def __enter__(self) -> _Tellers:
        self._folder = Path(tempfile.mkdtemp(prefix="ckptd-chaos-", dir="/tmp"))
        os.environ["XDG_STATE_HOME"] = str(self._folder)
        self._stack = contextlib.ExitStack()
        self._nursery = self._stack.enter_context(Nursery())
        self._server: S3Endpoint | None = None
        self._broken = False
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if not self._broken:
            shutil.rmtree(self._folder)

    def tell(self, seed: int, options: argparse.Namespace) -> tuple[Tally, bool]:
        """What it came to, and whether a promise was broken."""
        folder = self._folder / str(seed)
        kills = min(KILLS_A_STORY, options.kills)
        story: Story | Matrix
        if options.matrix:
            world = 1 + seed % 2
            story = Matrix(seed, self._nursery, folder, world=world)
        else:
            story = Story(seed, self._nursery, folder, self._s3() if seed % S3_EVERY == S3_EVERY - 1 else None)
        try:
            if isinstance(story, Matrix):
                story.tell(all_cells(seed))
            else:
                story.tell(kills)
            shutil.rmtree(folder)
        except Exception:
            self._broken = True
            traceback.print_exc()
            which = "--matrix --kills 1" if options.matrix else f"--kills {kills}"
            print(f'again: make chaos ARGS="--seed {seed} {which}"', flush=True)
            return story.tally, True
        return story.tally, False

    def _s3(self) -> S3Endpoint:
        if self._server is None:
            self._server = self._stack.enter_context(SeaweedFS(self._folder / "s3"))
        return self._server


def _told(log: Path | None) -> dict[int, dict[str, Any]]:
    """Seed → what it came to."""
    return {line["seed"]: line for line in _lines(log)}


def _lines(log: Path | None) -> Iterator[dict[str, Any]]:
    if log is not None and log.exists():
        yield from map(json.loads, log.read_text().splitlines())


def _note(log: Path | None, line: dict[str, Any]) -> None:
    if log is not None:
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _tally_of(line: dict[str, Any]) -> Tally:
    tally = Tally(**{name: line[name] for name in ("stories", "kills", "stops", "restores", "checkpoints")})
    tally.points.update(line["points"])
    return tally


def _in_words(tally: Tally) -> str:
    return (
        f"{tally.stories} stories, {tally.kills} kills, {tally.stops} stops, {sum(tally.points.values())} at "
        f"{len(tally.points)} named points, {tally.restores} restores, {tally.checkpoints} checkpoints"
    )


if __name__ == "__main__":
    raise SystemExit(main())
