"""One rank of a group of plain processes, told what to do line by line; reused from test to test.

Each line on standard input is a JSON object with a ``do``; each is answered by one JSON line on standard output.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckptd.errors import SaveError
from ckptd.storage import Backend
from ckptd_client import Checkpointer, Keep, Save, Stopped, stopping, supply
from ckptd_client.restored import Restored
from tests.client.conftest import Training
from tests.ranks import clock

if TYPE_CHECKING:
    from tests.ranks.flat import FlatTraining, ZeroOneTraining
    from tests.ranks.layouts import LayoutTraining, RowsTraining
    from tests.ranks.models import ParallelTraining
    from tests.ranks.odd import OddTraining

    Digested = LayoutTraining | RowsTraining | OddTraining | FlatTraining | ZeroOneTraining

IDLE_SECONDS = supply.IDLE_SECONDS
LOCK = threading.Lock()


class Deadlocked(torch.utils.data.Dataset[int]):
    """Whoever reads it waits for a lock that nobody in its process gives back."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with LOCK:
            return index


def collectives() -> list[int]:
    """How many collectives each process group of this rank has seen."""
    return [group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map]


class Worker:
    """Holds one checkpointer at a time."""

    def __init__(self) -> None:
        self.ckpt: Checkpointer | None = None
        self.stepped = 0
        self.training: Training | ParallelTraining | Digested = Training(width=16, layers=2)
        self.saves: dict[int, Save] = {}
        self.put_clock_right: Callable[[], None] = lambda: None

    def follow_clock(self, file: str) -> dict[str, Any]:
        """Until this rank leaves its group, its clock is wrong by what stands in a file."""
        self.put_clock_right()
        self.put_clock_right = clock.follow(Path(file))
        return {}

    def group(self, store: str, rank: int, world: int, timeout_seconds: float = 1800) -> dict[str, Any]:
        """Join a process group."""
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_seconds),
        )
        return {}

    def preflight(
        self, port: int, rank: int, world: int, node: str, environment: dict[str, str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Take part in a preflight, by the store at a port. Returns the exit code, and the report where this rank is
        the one that shows it."""
        import msgspec

        from ckptd.cli.doctor import Wishes
        from ckptd.cli.preflight import Options
        from ckptd.health.report import Report
        from ckptd_client.preflight import program

        launcher = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launcher |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "CKPTD_NODE": node, **(environment or {})}
        shown: list[Report] = []
        before = dict(os.environ)
        os.environ.update({name: str(value) for name, value in launcher.items()})
        try:
            code = program.run(Options(wishes=Wishes(None, 1, 2, 5), **options), shown.append)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return {"code": code, "shown": [msgspec.to_builtins(report) for report in shown]}

    def ungroup(self) -> dict[str, Any]:
        """Leave it, and everything that was built on it."""
        self.close()
        self.put_clock_right()
        self.training = Training(width=16, layers=2)
        self.saves = {}
        if dist.is_initialized():
            dist.destroy_process_group()
        return {}

    def open(
        self,
        url: str | list[str],
        rank: int,
        world: int,
        launch: str,
        socket: str,
        node: str = "",
        kind: str = "",
        layout: str = "",
        flat: str = "",
        odd: str = "",
        of: dict[str, Any] | None = None,
        width: int = 16,
        layers: int = 2,
        seed: int | None = None,
        idle_seconds: float = IDLE_SECONDS,
        beside: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """A new training and checkpointer of this rank. ``kind``: see :mod:`tests.ranks.models`; ``layout``: see
        :mod:`tests.ranks.layouts`; ``flat``: see :mod:`tests.ranks.flat`; ``odd``: see :mod:`tests.ranks.odd`;
        ``of``: what these are told; with a ``seed`` all ranks train the very same. ``node``: what its machine is
        called. ``idle_seconds``: how long a restore waits for saves in flight. ``beside``: what stands in the state and
        cannot be saved, an ``object`` or a ``name``."""
        os.environ["CKPTD_NODE"] = node
        supply.IDLE_SECONDS = idle_seconds
        if kind:
            from tests.ranks.models import ParallelTraining

            self.training = ParallelTraining(kind, width=width, layers=layers)
        elif layout:
            from tests.ranks.layouts import training

            self.training = training(layout, **(of or {}))
        elif flat:
            from tests.ranks.flat import training as flat_training

            self.training = flat_training(flat, **(of or {}))
        elif odd:
            from tests.ranks.odd import OddTraining

            self.training = OddTraining(odd, rank, world, **(of or {}))
        else:
            self.training = Training(width=width, layers=layers, seed=rank if seed is None else seed)
        self.saves = {}
        options.setdefault("keep", 50)
        options["keep"] = Keep(last=options["keep"])
        state = self.training.state
        if beside:
            state = {**state, **{"object": {"foreign": object()}, "name": {"": 1}}[beside]}
        self.stepped = 0
        self.ckpt = Checkpointer(url, state, rank=rank, world=world, launch=launch, socket=socket, **options)
        return {}

    def restore(self, **options: Any) -> dict[str, Any]:
        assert self.ckpt is not None
        return {**_described(self.ckpt.restore(**options)), "weights": self.weights()}

    def spoil(self, how: str) -> dict[str, Any]:
        """From now on a part of this rank's state cannot be had: ``module`` by a hook of its own, or ``object``, where
        there is not even a method to call."""
        assert self.ckpt is not None
        if how == "module":
            self.training.model.register_state_dict_post_hook(_fail)
        else:
            self.ckpt._state._state["scheduler"] = _Spoilt()  # type: ignore[index]
        return {}

    def restore_counted(self) -> dict[str, Any]:
        """A restore, and what it asked of the backend: by operation, calls and bytes."""
        from ckptd_backends.wrappers import Traced

        backends: list[Traced] = []
        begin = Traced.__init__

        def noted(traced: Traced, inner: Backend) -> None:
            begin(traced, inner)
            backends.append(traced)

        Traced.__init__ = noted  # type: ignore[method-assign]
        try:
            answer = self.restore()
        finally:
            Traced.__init__ = begin  # type: ignore[method-assign]
        counts: dict[str, list[int]] = {}
        for traced in backends:
            for operation, count in traced.counts.items():
                sums = counts.setdefault(operation, [0, 0])
                sums[0] += count.calls
                sums[1] += count.size_bytes
        return {**answer, "counts": counts}

    # Hangs

    def steps(self, count: int) -> dict[str, Any]:
        """So many steps of a training that does nothing."""
        assert self.ckpt is not None
        for _ in range(count):
            time.sleep(0.01)
            self.stepped += 1
            self.ckpt.step(self.stepped, loss=1.0)
        return {}

    def meet(self) -> dict[str, Any]:
        """A collective, which the others may never join."""
        dist.all_reduce(torch.ones(1))
        return {}

    def train_together(self, first: int, last: int) -> dict[str, Any]:
        """Steps with a collective in each, and what became of the saves."""
        assert self.ckpt is not None
        for step in range(first, last + 1):
            self.training.step()
            dist.all_reduce(torch.ones(1))
            if (save := self.ckpt.step(step)) is not None:
                self.saves[step] = save
        return {"states": {str(step): save.state for step, save in self.saves.items()}}

    def load_from_a_deadlocked_worker(self) -> dict[str, Any]:
        """A data loader whose worker waits for a lock that was held when it was forked."""
        with LOCK:
            for _ in torch.utils.data.DataLoader(Deadlocked(), num_workers=1):
                pass
        return {}

    def weights(self) -> list[str]:
        if hasattr(self.training, "values"):
            return []
        return [parameter.sum().item().hex() for parameter in self.training.model.parameters()]

    def weights_now(self) -> dict[str, Any]:
        """See :meth:`weights`."""
        return {"weights": self.weights()}

    def train(self, step: int) -> dict[str, Any]:
        """One training step, and a save if the schedule says so."""
        assert self.ckpt is not None
        loss = self.training.step()
        save = self.ckpt.step(step, loss=loss)
        if save is not None:
            self.saves[step] = save
        return {"saved": save is not None, "weights": self.weights()}

    def train_on(self, first: int, last: int) -> dict[str, Any]:
        """Steps one after the other, and how many of their saves were let go."""
        for step in range(first, last + 1):
            self.train(step)
        return {"let_go": sum(self.saves[step].state == "failed" for step in range(first, last + 1))}

    def train_to_the_stop(self, first: int, pause_seconds: float) -> dict[str, Any]:
        """Training steps until this rank is stopped, and where that was. Afterwards it is as if nobody had asked."""
        try:
            for step in itertools.count(first):
                self.train(step)
                time.sleep(pause_seconds)
        except Stopped as stopped:
            stopping.ASKED.by = ""
            assert self.ckpt is not None
            self.saves[stopped.step] = self.ckpt.save(stopped.step)  # the handle of the one that was taken there
            return {"step": stopped.step}
        raise AssertionError

    def save(self, step: int, **kinds: bool) -> dict[str, Any]:
        """A training step, and a save of it."""
        assert self.ckpt is not None
        self.training.step()
        self.saves[step] = self.ckpt.save(step, **kinds)
        return {"weights": self.weights()}

    def fate(self, step: int) -> dict[str, Any]:
        """What has become of a save until now."""
        error = self.saves[step].error
        return {"state": self.saves[step].state, "kind": type(error).__name__, "message": str(error)}

    def save_as_it_is(self, step: int) -> dict[str, Any]:
        """A save without a training step, and its end."""
        assert self.ckpt is not None
        self.saves[step] = self.ckpt.save(step)
        return self.wait(step)

    def run(self, steps: int = 1) -> dict[str, Any]:
        """Training steps without a checkpoint."""
        return {"losses": [self.training.step().hex() for _ in range(steps)]}

    def shift(self, field: str) -> dict[str, Any]:
        """Change the optimizer's state of the last parameter, so that it is another one than on other ranks."""
        from tests.ranks.odd import OddTraining

        assert isinstance(self.training, OddTraining)
        optimizer = self.training.optimizer
        optimizer.state[optimizer.param_groups[0]["params"][-1]][field] += 1
        return {}

    def shift_element(self, name: str) -> dict[str, Any]:
        """Change one element of what this rank holds of a parameter."""
        with torch.no_grad():
            parameter: Any = self.training.model.get_parameter(name)
            parameter.to_local().view(-1)[0] += 1
        return {}

    def values(self) -> dict[str, Any]:
        """A digest of all that the training consists of, whole, and of this rank's generators."""
        from tests.ranks.layouts import generators

        training: Any = self.training
        return {"values": training.values(), "generators": generators()}

    def save_alone(self, step: int) -> dict[str, Any]:
        """A save without a training step, and how many collectives it took."""
        assert self.ckpt is not None
        before = collectives()
        self.saves[step] = self.ckpt.save(step)
        self.saves[step].wait("sealed", timeout=60)
        return {"collectives": sum(collectives()) - sum(before)}

    def whole(self, path: str) -> dict[str, Any]:
        """Every tensor as torch gathers it, written to a file by rank 0."""
        training: Any = self.training
        found = training.whole()
        if dist.get_rank() == 0:
            torch.save(found, path)
        return {}

    def wait(self, step: int, stage: str = "committed") -> dict[str, Any]:
        self.saves[step].wait(stage, timeout=60)  # type: ignore[arg-type]
        return {"state": self.saves[step].state, "overlapped_bytes": self.saves[step].stats.overlapped_bytes}

    def close(self) -> dict[str, Any]:
        if self.ckpt is not None:
            ckpt, self.ckpt = self.ckpt, None
            ckpt.close(60)
        return {}

    def close_anyway(self) -> dict[str, Any]:
        """Also where the last save was let go."""
        with contextlib.suppress(SaveError):
            self.close()
        return {}


def _fail(*_: object) -> None:
    raise RuntimeError("the training's own trouble")


class _Spoilt:
    @property
    def state_dict(self) -> None:
        _fail()


def _described(restored: Restored) -> dict[str, Any]:
    report = restored.report
    return {
        "step": restored.step,
        "source": restored.source,
        "generation": restored.generation,
        "tier": restored.tier,
        "decision": restored.decision,
        "notices": list(report.notices),
        "loaded": list(report.loaded),
        "missing": list(report.missing),
        "unexpected": list(report.unexpected),
        "skipped": dict(report.skipped),
    }


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
