"""torch's elastic agent, which starts and watches the workers of a node, with our word on what comes after a failure.

Only what :class:`SimpleElasticAgent` leaves to its subclasses is overridden; rendezvous, environment and logs are
torch's.
"""

# torch's decorators hide the types of what is overridden here.
# pyright: reportCallIssue=false, reportIncompatibleVariableOverride=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any
from unittest import mock

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from ckptd_client.launch.supervisor import Supervisor
from ckptd_client.topology import LAUNCH_VARIABLE

RESTARTS_UNLIMITED = 1_000_000
"""As torch counts them; our own policy ends them."""


class Agent(LocalElasticAgent):
    """One node's."""

    supervisor: Supervisor
    family: str = ""
    """What the launches of all starts are called, before the restart count."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        family = self.family or spec.rdzv_handler.get_run_id()
        launch = f"{family}#{spec.max_restarts - self._remaining_restarts}"
        os.environ[LAUNCH_VARIABLE] = launch
        self.supervisor.starting(launch)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self.supervisor.started([ids[rank] for rank in sorted(ids)])
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.supervisor.look() == "wait":
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and not self._again():
            self._remaining_restarts = 0
        return result

    def _again(self) -> bool:
        self.supervisor.clear()
        return self.supervisor.again()

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(*args, **kwargs)
        self.supervisor.clear()


@contextlib.contextmanager
def as_agent_of_torchrun(supervisor: Supervisor, family: str) -> Generator[None]:
    """Within, torchrun's launcher makes agents of ours."""
    kind = type("Agent", (Agent,), {"supervisor": supervisor, "family": family})
    with mock.patch("torch.distributed.launcher.api.LocalElasticAgent", kind):
        yield
