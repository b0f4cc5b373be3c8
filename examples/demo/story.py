"""The story that is told twice, on local disk and on S3: who is killed when, and what must be true afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.demo.compare import events
from examples.demo.stage import DemoFailed, Stage

STEPS = 50
EVERY = 10
KILL_TRAINER_IN = 20
"""The step whose write is under way when the trainer is killed."""
KILL_BOTH_IN = 40
STEPS_BEYOND = 2
"""So many steps are done after the save, and lost with the trainer, before the kill."""
HALF = 0.5
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """How far the daemon was with a write at a kill."""

    step: int
    bytes_done: int
    bytes: int

    def __str__(self) -> str:
        return f"step {self.step}, at {self.bytes_done / self.bytes:.0%}"


@dataclass(frozen=True, slots=True)
class Story:
    """What was measured that the trainer itself cannot know."""

    trainer_killed_in: Moment
    committed_after_seconds: float
    """From the trainer's death to the commit of what it had handed over."""
    both_killed_in: Moment


def tell(stage: Stage, bytes_per_second: float, say: Say) -> Story:
    """Run it. Raises :class:`DemoFailed` where anything is not as promised."""
    options = [stage.url, "--steps", str(STEPS), "--every", str(EVERY)]
    stage.start_daemon(bytes_per_second)

    say("training")
    stage.start_trainer(options)
    await_write(stage, KILL_TRAINER_IN)
    stage.kill_trainer()
    died = time.monotonic()
    first = moment(stage, KILL_TRAINER_IN)
    say("trainer killed; the daemon goes on")
    stage.wait_for(lambda: committed_step(stage) == KILL_TRAINER_IN, f"the commit of step {KILL_TRAINER_IN}")
    committed_after_seconds = time.monotonic() - died

    say("trainer restarted")
    stage.start_trainer(options)
    await_restore(stage, 2, "memory", KILL_TRAINER_IN)
    say("training")
    await_write(stage, KILL_BOTH_IN)
    second = moment(stage, KILL_BOTH_IN)
    stage.kill_both()

    say("both killed; both restarted")
    stage.start_daemon(bytes_per_second)
    stage.start_trainer(options)
    await_restore(stage, 3, "storage", KILL_BOTH_IN - EVERY)
    say("training")
    stage.wait_for_trainer()
    if committed_step(stage) != STEPS:
        raise DemoFailed(f"the last commit is that of step {committed_step(stage)}, not {STEPS}")
    return Story(first, committed_after_seconds, second)


def await_write(stage: Stage, step: int) -> None:
    """Until a part of its bytes is on the way and the trainer some steps beyond this one; where it is slow, as others
    use the machine, until half of them is."""

    def far_enough() -> bool:
        done = [save["bytes_done"] / save["bytes"] for save in writes(stage, step) if save["bytes_done"]]
        return bool(done) and (stage.last_step() >= step + STEPS_BEYOND or done[0] >= HALF)

    stage.wait_for(lambda: stage.last_step() >= step, f"step {step}")
    stage.wait_for(far_enough, f"the write of step {step}")


def moment(stage: Stage, step: int) -> Moment:
    """The write that is under way *now*. Raises :class:`DemoFailed` where there is none."""
    found = writes(stage, step)
    if not found or not 0 < found[0]["bytes_done"] < found[0]["bytes"]:
        raise DemoFailed(f"no write of step {step} was under way at the kill: it proves nothing")
    return Moment(step, found[0]["bytes_done"], found[0]["bytes"])


def writes(stage: Stage, step: int) -> list[dict[str, Any]]:
    """The daemon's saves of this step that are neither unstarted nor durable."""
    saves = stage.status()["saves"]["listed"]
    return [s for s in saves if step_of(s["version"]) == step and s["stage"] == "write"]


def committed_step(stage: Stage) -> int | None:
    """The step that the daemon has committed last."""
    versions = list(stage.status()["committed"].values())
    return step_of(versions[-1]) if versions else None


def step_of(version: str) -> int:
    """The step in ``000000000020-g000001``."""
    return int(version.partition("-")[0])


def await_restore(stage: Stage, life: int, source: str, step: int) -> None:
    """Until the trainer in this life has restored, and from where and what it must have."""

    def restores() -> list[dict[str, Any]]:
        return list(events(stage.folder, "restored"))

    stage.wait_for(lambda: len(restores()) == life, f"the restore of life {life}")
    found = restores()[-1]
    if (found["source"], found["step"]) != (source, step):
        raise DemoFailed(f"restored step {found['step']} from {found['source']}, not step {step} from {source}")
