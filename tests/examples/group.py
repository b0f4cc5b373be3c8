"""Groups of ranks of ``examples.elastic``, one after the other, forked from a process that has imported torch once.

Each line on standard input is a JSON object with a ``do``; each is answered by one JSON line on standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from examples import elastic

PR_SET_PDEATHSIG = 1


class Group:
    """The ranks that run now."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.ended: dict[int, int] = {}

    def start(self, argv: list[str], environment: dict[str, str], output: str) -> dict[str, Any]:
        """Fork as many ranks as the environment says, told apart as torchrun tells them."""
        self.ended = {}
        for rank in range(int(environment["WORLD_SIZE"])):
            pid = os.fork()
            if pid == 0:
                _be_a_rank(argv, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, Path(output))
            self.running.add(pid)
        return {}

    def look(self) -> dict[str, Any]:
        """How many run, and the exit codes of those that ended; a signal's is negative."""
        for pid in list(self.running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._reaped(pid, status)
        return {"running": len(self.running), "ended": sorted(self.ended.values())}

    def end(self) -> dict[str, Any]:
        """SIGKILL to all; on return they are gone."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self.running):
            self._reaped(pid, os.waitpid(pid, 0)[1])
        return {}

    def _reaped(self, pid: int, status: int) -> None:
        self.running.remove(pid)
        self.ended[pid] = os.waitstatus_to_exitcode(status)


def _be_a_rank(argv: list[str], environment: dict[str, str], output: Path) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with output.open("ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        os.environ.update(environment)
        elastic.main(argv)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # what is imported only when it is used first
    group = Group()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(group, request.pop("do"))(**request)), flush=True)
    group.end()


if __name__ == "__main__":
    main()
