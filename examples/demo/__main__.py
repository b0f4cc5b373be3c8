"""``make demo``: trains a small GPT, kills it and its daemon in the middle of writes, resumes it, and compares every
bit with a run that never imported ckptd. First on local disk, then on a real S3 server. Ends with 1 on any difference.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ckptd.errors import CkptdError
from devtools.seaweedfs import SeaweedFS
from examples.demo.compare import differences, events
from examples.demo.report import Result, print_report, step_seconds
from examples.demo.stage import DemoFailed, stage
from examples.demo.story import EVERY, STEPS, tell

WRITE_FRACTION = 0.5
"""The bandwidth limit lets a write take this much of the time between two saves, as measured on this machine."""


class Demo:
    """One telling: the reference first, then the story on each kind of storage."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.reference = folder / "plain"
        self._folder = folder
        self._progress = progress

    def train_plainly(self) -> None:
        """The run that everything is compared with."""
        task = self._task("without ckptd")
        with stage(self.reference, "", {}, lambda: None) as plain:
            plain.on_wait = lambda: self._progress.update(task, completed=plain.last_step())
            plain.start_trainer(["--plain", "--steps", str(STEPS)])
            plain.wait_for_trainer()
        if [end["imported_ckptd"] for end in events(self.reference, "end")] != [False]:
            raise DemoFailed("the run without ckptd has imported it")
        self._progress.update(task, completed=STEPS, phase="")

    def on_local_disk(self) -> Result:
        """The story in a folder."""
        return self._tell("local disk", (self._folder / "checkpoints").as_uri(), {})

    def on_s3(self) -> Result:
        """The story on an S3 server of our own."""
        with SeaweedFS(self._folder / "s3-server") as server:
            return self._tell("S3", server.prefix(), server.environment)

    def _tell(self, where: str, url: str, environment: dict[str, str]) -> Result:
        task = self._task(where)

        def say(phase: str) -> None:
            self._progress.update(task, phase=phase)
            self._tell_a_log(where, phase)

        with stage(self._folder / where.replace(" ", "-"), url, environment, lambda: None) as made:
            made.on_wait = lambda: self._progress.update(task, completed=made.last_step())
            limit = self._bytes_per_second()
            began = time.monotonic()
            story = tell(made, limit, say)
            took = time.monotonic() - began
        self._progress.update(task, completed=STEPS, phase="")
        found = differences(self.reference, made.folder)
        return Result(where, limit, took, story, made.folder, found)

    def _bytes_per_second(self) -> float:
        state_bytes = (self.reference / "final.safetensors").stat().st_size
        return state_bytes / (EVERY * step_seconds(self.reference) * WRITE_FRACTION)

    def _task(self, name: str) -> TaskID:
        self._tell_a_log(name, "training")
        return self._progress.add_task(name, total=STEPS, phase="training")

    def _tell_a_log(self, name: str, phase: str) -> None:
        """A line for each phase where no bar can be drawn."""
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{name}: {phase}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="examples.demo", description="The main job of ckptd, end to end.")
    parser.add_argument("--only", choices=("disk", "s3"), help="tell the story on this kind of storage only")
    only = parser.parse_args(argv).only
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    # The demo's server and daemon are its own: nothing of this user's cloud settings may reach them.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"NO_PROXY": "127.0.0.1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[phase]}"),
    )
    console.print("A small GPT learns Python's own library by heart, and is killed for it.\n")
    try:
        with tempfile.TemporaryDirectory(prefix="ckptd-demo-") as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/torch"  # torch makes a folder as soon as it is imported
            with Progress(*columns, console=console) as progress:
                demo = Demo(Path(folder), progress)
                demo.train_plainly()
                results = [demo.on_local_disk()] if only != "s3" else []
                results += [demo.on_s3()] if only != "disk" else []
            return print_report(console, demo.reference, results)
    except (DemoFailed, CkptdError) as error:
        console.print(f"The demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
