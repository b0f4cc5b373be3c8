"""``python -m tests.power``: many stories, each of its own seed, told to the end or until a promise breaks.

A story that broke one is told again by the command that is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from tests.power.life import Story
from tests.power.promises import Broken
from tests.power.tiers import TieredStory
from tests.power.wrong import WRONG, WRONG_WITH_TIERS, Wrong


def main() -> int:
    """The exit code: how many stories broke a promise, or how many wrong ways were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many stories")
    parser.add_argument(
        "--wrong", nargs="?", const="", metavar="WORDS", help="the first seed that finds each wrong way so called"
    )
    parser.add_argument("--tiers", action="store_true", help="stories of two tiers, on disks that are lost apart")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    kind: Callable[[int], Story | TieredStory] = TieredStory if options.tiers else Story
    return min(_tell(kind, seeds) if options.wrong is None else _find_wrong(kind, options.wrong, seeds), 100)


def _tell(kind: Callable[[int], Story | TieredStory], seeds: range) -> int:
    began = time.monotonic()
    changes = looks = broken = copied = lost = 0
    for seed in seeds:
        story = kind(seed)
        try:
            story.tell()
        except Broken as error:
            broken += 1
            again = f"--first {seed} --seeds 1" + " --tiers" * isinstance(story, TieredStory)
            print(f'{error}\n  {error.__notes__[-1]}; again: make power ARGS="{again}"', flush=True)
        changes, looks = changes + story.changes, looks + story.looks
        if isinstance(story, TieredStory):
            copied, lost = copied + story.copied, lost + story.lost
        if (seed - seeds.start) % 50 == 49:
            print(f"up to seed {seed}: {changes} changes, {looks} losses of power, {broken} broken", flush=True)
    print(
        f"{len(seeds)} stories from seed {seeds.start}: {changes} changes of the disk, {looks} losses of power, "
        f"{broken} broken promises, {time.monotonic() - began:.0f} s"
        + (f"; {copied} copies, {lost} disks lost" if copied else "")
    )
    return broken


def _find_wrong(kind: Callable[[int], Story | TieredStory], words: str, seeds: range) -> int:
    known = WRONG_WITH_TIERS if kind is TieredStory else WRONG
    ways = {name: wrong for name, wrong in known.items() if words in name}
    return sum(not _is_found(kind, name, wrong, seeds) for name, wrong in ways.items())


def _is_found(kind: Callable[[int], Story | TieredStory], name: str, wrong: Wrong, seeds: range) -> bool:
    for seed in seeds:
        try:
            with wrong():
                kind(seed).tell()
                if kind is Story:
                    Story(seed, hurried=True).tell()
        except Broken as error:
            print(f"{name}: {error}\n  {error.__notes__[-1]}", flush=True)
            return True
    print(f"{name}: not found", flush=True)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
