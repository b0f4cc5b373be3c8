"""torch's elastic agent, which starts and watches the workers of a node, with our word on what comes after a failure.

Only what :class:`SimpleElasticAgent` leaves to its subclasses is overridden; rendezvous, environment and logs are
torch's. The agents of a start's nodes agree on what is common to it before they start workers: its number, which is
part of the launch id, what is known of earlier failures, and the store in which the workers are to meet.
"""

# torch's decorators hide the types of what is overridden here.
# pyright: reportCallIssue=false, reportIncompatibleVariableOverride=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Generator
from typing import Any, cast
from unittest import mock

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler

from ckptd_client.agreement import Agreement
from ckptd_client.launch.council import LOOK_SECONDS, Council
from ckptd_client.launch.policy import History
from ckptd_client.launch.rendezvous import Lasting
from ckptd_client.launch.supervisor import Supervisor
from ckptd_client.meeting import TorchStore
from ckptd_client.topology import LAUNCH_VARIABLE

RESTARTS_UNLIMITED = 1_000_000
"""As torch counts them; our own policy ends them."""
NO_ID = "none"
"""What torch calls a rendezvous without a name."""


class Agent(LocalElasticAgent):
    """One node's."""

    supervisor: Supervisor
    family: str = ""
    """What the launches of all starts are called, before the number of the start."""
    next_number: int = 0
    """Of a start, by what this node has seen."""
    workers_store: TCPStore | None = None
    launch: str
    council: Council
    history: History

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        spec.rdzv_handler = cast(RendezvousHandler, Lasting(spec.rdzv_handler))
        super().__init__(spec, *args, **kwargs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Else torch tells only those who ask for the first time, and others never hear of another first node.
        each_time = mock.patch.dict(os.environ, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        with self.supervisor.waiting_for_others():
            with each_time:
                super()._rendezvous(worker_group)
            self._agree(worker_group)

    def _agree(self, group: WorkerGroup) -> None:
        """On what all nodes of this start have in common. The one that has seen most knows best."""
        store, agreement = self._of_this_start(group)
        run_id = group.spec.rdzv_handler.get_run_id()
        mine = {
            "family": self.family or (uuid.uuid4().hex if run_id == NO_ID else run_id),
            "number": self.next_number,
            "history": msgspec.to_builtins(self.supervisor.history),
        }

        def decide(all_of_them: list[dict[str, Any]]) -> dict[str, Any]:
            best = max(all_of_them, key=lambda one: one["number"])
            return {**best, **self._meeting_place(group, best["number"])}

        told = agreement.decide("start", mine, decide)
        number, spec = told["number"], group.spec
        group.master_addr, group.master_port = told["address"], told["port"]
        self._remaining_restarts = spec.max_restarts - number  # torch tells the workers what is left
        self.next_number = number + 1
        self.council = Council(PrefixStore("council", store), group.group_rank or 0, group.group_world_size or 1)
        self.history = msgspec.convert(told["history"], History)
        self.family = told["family"]
        self.launch = f"{self.family}#{number}"

    def _of_this_start(self, group: WorkerGroup) -> tuple[Store, Agreement]:
        """A store that no other start has. A static rendezvous has the same one for all, and always the same nodes:
        each counts there how often it has come, also as another process."""
        assert group.store is not None
        node, start = group.group_rank or 0, 0
        if group.spec.rdzv_handler.get_backend() == "static":
            start = group.store.add(f"ckptd/came/{node}", 1)
        store = PrefixStore(f"ckptd/{start}", group.store)
        return store, Agreement(TorchStore(store, "agreement/"), node, group.group_world_size or 1)

    def _meeting_place(self, group: WorkerGroup, number: int) -> dict[str, Any]:
        """On the first node: where the workers of this start meet. torch keeps one store for all starts, in which they
        would find what those before have left; and of a node that was first before, others go on to believe that."""
        found: dict[str, Any] = {"address": group.master_addr, "port": group.master_port}
        handler = group.spec.rdzv_handler
        first_of_static = handler.get_backend() == "static" and number == 0  # the port may be the only open one
        if handler.use_agent_store and not first_of_static:
            self.workers_store = TCPStore(
                found["address"], 0, is_master=True, multi_tenant=True, wait_for_workers=False
            )
            found["port"] = self.workers_store.port
        return found

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        os.environ[LAUNCH_VARIABLE] = self.launch
        self.supervisor.starting(self.launch, self.council, self.history)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self.supervisor.started([ids[rank] for rank in sorted(ids)])
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        while (found := self.supervisor.look()) == "wait":
            time.sleep(LOOK_SECONDS)
        if found == "regroup":  # another node has told
            super()._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and not self._again():
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """After a failure, or, where the workers are well, because another node waits."""
        if worker_group.state == WorkerState.HEALTHY:
            found = self.supervisor.regroup()
            if found == "run":
                return
            if found == "over" and not self._again():
                raise self.supervisor.outcome or AssertionError
        super()._restart_workers(worker_group)

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
