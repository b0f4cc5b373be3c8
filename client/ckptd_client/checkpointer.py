"""The checkpointer: what a training loop holds."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.selectors import Selector
from ckptd.errors import CkptdError, StateError, UsageError
from ckptd.format.keys import STEP_MAX, Version
from ckptd.format.metrics import metrics_for_record
from ckptd.pulse.loss_rules import LossRules, OnBadLoss
from ckptd.pulse.page import Phase
from ckptd.pulse.pulse import PhaseName, phase_named
from ckptd.wire import messages
from ckptd.wire.channel import default_socket
from ckptd.wire.messages import Hello
from ckptd_client import leaving, stopping
from ckptd_client.agreement import nodes_of, open_agreement
from ckptd_client.capture import Capture, Placement, State
from ckptd_client.collecting import collecting_later
from ckptd_client.generation import Life, Opening, WriterClaim, open_life
from ckptd_client.handles import Handles, await_ends
from ckptd_client.link import DaemonLink
from ckptd_client.progress import FromGpu, Progress, figures
from ckptd_client.restore import Restorer
from ckptd_client.restored import Restored, Wish
from ckptd_client.resume import resumed
from ckptd_client.save import Save
from ckptd_client.saving import DUE, OnError, OnFull, Saving
from ckptd_client.schedule import Appointments, Schedule
from ckptd_client.settings import (
    LogRanks,
    check_metric,
    check_settings,
    check_step,
    check_values,
    check_words,
    declared,
    loader_of,
    refuse_patterns_of_nothing,
    selections,
    to_be_finite,
)
from ckptd_client.snapshots import Snapshots, planned_or_refused
from ckptd_client.staging.plan import Plan
from ckptd_client.staging.stager import Check, Stager
from ckptd_client.supply import ArenaSupply
from ckptd_client.tiers import Url, as_tiers, check_furthest, find_shared, of_hello, roots_of
from ckptd_client.topology import Topology

CLOSE_SECONDS = 600.0
CLOSE_AFTER_ERROR_SECONDS = 10.0
"""How long one of several ranks that fails waits for its saves to be committed; the daemon goes on."""

_log = logging.getLogger("ckptd")


class Checkpointer:
    """Asynchronous checkpoints of a training state: a point-in-time copy in shared memory, and a daemon that does the
    rest. Use it as a context manager, or call :meth:`close`. Not thread-safe: all methods belong to the training
    thread.

    ``url``: the run's root, ``file:///…``, ``s3://bucket/prefix``, any fsspec URL, or a plain path; or several, the
    nearest first, each a :class:`Tier` where more is to be said: a save is committed on the nearest one, and copied on
    in the background. ``state``: a dict
    of name → anything with ``state_dict``/``load_state_dict``, or tensors and plain values in nested dicts and lists.
    ``every_steps``, ``every`` (seconds): when :meth:`step` saves. ``keep``: what retention leaves. ``slots``:
    snapshots held at once; two let one be written while the next is taken. ``overlap``: copy parameters and optimizer
    state during the next forward and backward, where that has proved safe. ``check``: how a mixture is looked for;
    ``"full"`` compares every byte. ``on_full``: with no free slot ``"wait"`` at most ``max_wait`` seconds and then
    skip, ``"skip"`` at once, or ``"fail"``; the last save before a stop waits in any case. Several ranks try fewer
    of the saves that are due from then on, all of them the same; and of all saves where they do not wait. ``rng``:
    include all random-number generators.
    ``socket``: the daemon's, else ``$CKPTD_SOCKET``, else a private folder. ``on_error="raise"``: a failed save raises
    at the next :meth:`step`; else it is logged, and found on its handle. ``takeover``: take the run from a live owner.
    ``start_daemon=False``: where no daemon answers, wait for the one that somebody else runs. ``rank``, ``world``,
    ``launch``: where neither torch.distributed nor a launcher tells them. ``stop_on``: signals, such as ``"SIGTERM"``,
    that any rank may get: all ranks then save the same step, where :meth:`step` ends them; ``ckptd run`` names some.

    What several ranks hold alike is saved once, in shares. A DTensor says what it is, and data parallelism is known;
    ``replicated`` names the other plain tensors that are equal on all ranks: ``True`` for all of them, or patterns
    (``["model/*"]``) of their names. ``resident``: where replicas are on several nodes, each node keeps all of them in
    its memory, once among its ranks, so that it can restore without the store; it costs memory, and time to copy.
    ``check_replicas``: every rank copies all of its replicas, and a step in which they differ is not committed.

    ``check_finite``: look for nan and infinity in the copy of what an optimizer owns, or of what matches these patterns
    of names; a step that has any is marked unhealthy, and not restored while there is a healthy one. ``verify_load``:
    ``module:function``; of each ``verify_load_every`` commits the daemon has one loaded by it, in a process of its own,
    as ``function(url, checkpoint, storage_options)``; one for which it raises is marked suspect.
    ``incremental``: what is unchanged since an older checkpoint is not stored again; that one stays while it is needed.

    ``log_ranks``: whose steps are in the training log, see :meth:`step`: the ``"first"`` rank's, those of ``"all"``, or
    of ``"none"``. ``on_bad_loss``: where the loss is not finite or spikes, by ``loss_rules``, ``"alert"`` people;
    ``"pin"`` the last checkpoint from before as well; or ``"go_back"`` to it, which marks the later ones unhealthy and
    kills the trainers of this node, for their launcher to start them anew.
    """

    def __init__(
        self,
        url: Url,
        state: Mapping[str, object],
        *,
        every_steps: int | None = None,
        every: float | None = None,
        keep: Keep | None = None,
        slots: int = 2,
        overlap: bool = True,
        check: Check = "sample",
        on_full: OnFull = "wait",
        max_wait: float = 30.0,
        rng: bool = True,
        replicated: bool | Sequence[str] = False,
        resident: bool = True,
        check_replicas: bool = False,
        check_finite: bool | Sequence[str] = False,
        verify_load: str | None = None,
        verify_load_every: int = 10,
        incremental: bool = True,
        log_ranks: LogRanks = "first",
        on_bad_loss: OnBadLoss = "pin",
        loss_rules: LossRules | None = None,
        socket: str | Path | None = None,
        storage_options: Mapping[str, Any] | None = None,
        on_error: OnError = "log",
        takeover: bool = False,
        start_daemon: bool = True,
        stop_on: Sequence[str] | None = None,
        rank: int | None = None,
        world: int | None = None,
        launch: str | None = None,
    ) -> None:
        """Agree with the other ranks, and connect to the daemon, starting one where none runs.

        Raises :class:`StateError` for a state that cannot be saved, :class:`ConfigError`,
        :class:`ckptd.errors.DaemonError`, :class:`ckptd.errors.RunInUse`; nothing was written then.
        """
        check_settings(
            every_steps=every_steps, every=every, slots=slots, max_wait=max_wait, verify_load_every=verify_load_every
        )
        check_words(log_ranks=log_ranks, on_bad_loss=on_bad_loss, on_full=on_full, on_error=on_error, check=check)
        check_values(state, keep, loss_rules)
        stopping.listen(stop_on)
        self._on_error: OnError = on_error
        self._takeover = takeover
        topology = Topology.detect(rank, world, launch)
        self._rank, self._world = topology.rank, topology.world
        self._loader = loader_of(verify_load)
        self._load_every = verify_load_every
        self._incremental = incremental
        self._on_bad_loss: OnBadLoss = on_bad_loss
        self._loss_rules = loss_rules or LossRules()
        self._logs = log_ranks == "all" or (log_ranks == "first" and self._rank == 0)
        alike, finite = declared(replicated), to_be_finite(check_finite)
        self._tiers = as_tiers(url, keep, storage_options)
        check_furthest(self._tiers, self._world)
        self._agree(topology)
        path = Path(socket) if socket is not None else default_socket()
        self._link = DaemonLink(path, self._hello(), start_daemon=start_daemon, logs=self._logs)
        self._supply = ArenaSupply(self._link, slots=slots)
        self._handles = Handles(slot_freed=self._supply.wake)

        def make() -> State:
            return State(state, world=self._world, rng=rng, rank=self._rank, replicated=alike)

        try:
            planned, nodes = nodes_of(self._agreement, path, lambda: self._get_ready(make))
            options = {"replicated": alike, "check_finite": finite}
            refuse_patterns_of_nothing(self._agreement, self._state, planned[0], options)
        except BaseException:
            self._link.close()
            raise
        self._state.place(Placement(self._rank, self._world, nodes, resident=resident, check=check_replicas))
        self._claim = WriterClaim(self._roots)
        self._stager = Stager(
            self._link.tell, overlap=overlap, check=check, check_finite=finite, pulse=self._link.pulse
        )
        self._snapshots = Snapshots(
            self._state, planned, self._supply, self._stager, self._rank, self._world, check_replicas=check_replicas
        )
        self._saving = Saving(
            self._snapshots, self._handles, self._link, self._rank, self._world, on_full=on_full, max_wait=max_wait
        )
        appointments = Appointments(self._agreement.store, self._rank, self._world, self._saving.missed, stopping.ASKED)
        self._schedule = Schedule(every_steps, every, appointments, self._rank)
        self._progress = Progress(self._link.pulse)
        self._stepped = 0
        self._over = ""
        """Why it is of no use any more."""
        leaving.opened(self)
        if not any(offer.writable for offer in self._supply.held()):
            self._supply.begin(self._snapshots.slot_bytes_expected())

    def _agree(self, topology: Topology) -> None:
        """What the ranks have to know of each other: how they talk, what their start is called, which tiers they see
        together."""
        roots = roots_of(self._tiers, topology.launch)
        self._agreement = open_agreement(topology, roots[-1], "\n".join(tier.url for tier in self._tiers))
        if not topology.launch:
            launch = self._agreement.decide("launch", None, lambda _: uuid.uuid4().hex)
            roots = roots_of(self._tiers, launch)
        self._roots = find_shared(self._agreement, roots)
        self._launch = roots[0].launch

    def _get_ready(self, make: Callable[[], State]) -> tuple[Capture, Plan]:
        """What a single rank may fail in: its state can be saved, and its daemon answers."""
        self._state = make()
        with collecting_later():
            planned = planned_or_refused(self._state)
        self._link.open(
            on_event=self._handles.on_event,
            on_renewed=self._supply.hand_over,
            on_refused=self._handles.on_refused,
        )
        return planned

    def _hello(self) -> Hello:
        return Hello(
            protocol=messages.PROTOCOL,
            tiers=of_hello(self._tiers, self._roots),
            rank=self._rank,
            world=self._world,
            launch=self._launch,
            takeover=self._takeover,
            loader=None if self._loader is None else msgspec.to_builtins(self._loader),
            load_every=self._load_every,
            incremental=self._incremental,
            on_bad_loss=self._on_bad_loss,
            loss_rules=msgspec.to_builtins(self._loss_rules),
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def daemon_pid(self) -> int:
        """The process that writes for this one, as it was when the session was opened last."""
        return self._link.welcome.pid

    # Restoring

    def restore(
        self,
        step: Selector = "latest",
        *,
        required: bool = False,
        strict: bool = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        weights_only: bool = False,
        cast: bool | Sequence[str] = False,
    ) -> Restored:
        """Restore the newest checkpoint that all ranks can have, or the one of a step, and open the next generation. To
        be called once, before the first step or save.

        Memory first, then storage; everything is verified before the live state is touched, and a failed restore leaves
        it as it was. ``step=0`` starts over from nothing, beside what is there. All ranks call this, in the same order.
        In a restart by the same launcher the newest checkpoint is meant, whatever ``step`` says, once there is one.

        The checkpoint may come from another number of ranks, or another layout: each rank reads what it needs.
        ``include`` and ``exclude``: shell-like patterns over names such as ``model/layers.0.weight``, each standing for
        what is below it too; the rest stays as it is. A pattern that stands for nothing, on no rank, is an error.
        ``weights_only``: the modules of the state and nothing else. ``cast``: tensors that may be taken in another
        dtype than that in which they were saved, by patterns, or all.

        Raises :class:`ckptd.errors.ConfigError` for patterns that are none or stand for nothing, of ``cast`` too,
        :class:`ckptd.errors.NoCheckpoint` where ``required`` and nothing was found, :class:`MismatchError` where
        ``strict`` and names, shapes or dtypes do not fit, :class:`ckptd.errors.IntegrityError` where nothing verifies,
        and the store's own error where it cannot tell.
        """
        self._check_open()
        if self._saving.life is not None:
            raise UsageError("restore() comes before the first step or save, and once")
        step = resumed(step, self._agreement, self._roots, self._supply.await_idle)
        fresh = step == 0
        if fresh:
            restored = Restored()
        else:
            selection, casts = selections(self._state, include, exclude, cast, weights_only=weights_only)
            wish = Wish(
                step=step,
                required=required,
                strict=strict,
                selection=selection,
                cast=casts,
            )
            restorer = Restorer(self._state, self._agreement, self._roots, self._supply, self._life_ahead, wish)
            with self._link.pulse.phase(Phase.RESTORE), collecting_later(), self._supply.held_back():
                restored = restorer.restore()
        restored.generation = self._open_life(restored.version, fresh=fresh).generation
        self._supply.settle(self._snapshots.slot_bytes_expected())
        return restored

    def _opening(self, opened_from: Version | None, *, fresh: bool = False) -> Opening:
        return Opening(self._launch, self._world, opened_from, fresh, self._takeover)

    def _life_ahead(self, opened_from: Version) -> contextlib.AbstractContextManager[None]:
        return self._claim.ahead(self._opening(opened_from)) if self._rank == 0 else contextlib.nullcontext()

    def _open_life(self, opened_from: Version | None, *, fresh: bool) -> Life:
        life = self._saving.life
        if life is None:
            opening = self._opening(opened_from, fresh=fresh)
            life = self._saving.life = open_life(self._agreement, self._roots, self._claim, opening)
            self._link.pulse.opened(life.generation)
        return life

    # Saving

    def step(self, step: int, **metrics: Any) -> Save | None:
        """To be called once after each optimizer step (scheduler and averages included): reports progress, and saves
        when a save is due. ``metrics``: numbers such as ``loss``, ``grad_norm`` and ``tokens``, for the training log.
        Tensors of one number on a CUDA device are logged as soon as they have been copied from there, mostly at the
        next step; nothing waits for that, unless a save is due. On any other device they are read at once.

        The first one opens the generation where :meth:`restore` has not, on all ranks, so that its steps have a log.

        Raises :class:`UsageError` for a metric that is no number, nor ``None``, for a step before the last one, and
        for a first one where the run has checkpoints and nothing was restored; and what :meth:`restore` raises for a
        generation that cannot be opened.
        Returns the handle of a save, or ``None``. Never raises for a save that failed, unless ``on_error="raise"``.
        Raises :class:`ckptd_client.Stopped`, a ``SystemExit``, on all ranks at the same step, after a last save, where
        one of them got a signal of ``stop_on``.
        """
        if self._over:
            raise UsageError(self._over)
        if type(step) is not int or not self._stepped <= step <= STEP_MAX:
            check_step(step, self._stepped)
        values, on_gpu = figures(step, metrics)
        if self._saving.life is None:  # what is reported belongs to a generation from the first step on
            self._open_life(None, fresh=False)
        self._stepped = step
        now_ns = time.monotonic_ns()
        if self._handles.failed:
            self._saving.report_failures(self._on_error)
        due = self._schedule.due(step, now_ns)
        late = None
        if on_gpu is not None:
            late = FromGpu(on_gpu)
            if due:
                values |= late.numbers()
                late = None
        self._progress.report(now_ns, step, values, late)
        stops = self._schedule.appointments.stops(step)
        self._saving.stepped(step, last=stops)
        save = None
        if due:
            numbers = metrics_for_record({name: values.get(name) for name in metrics})
            save = self._request(step, DUE, numbers, last=stops)
        if stops and not self._saving.any_deferred:
            self.fence()
            raise stopping.Stopped(step)
        return save

    def save(
        self,
        step: int,
        *,
        pin: bool = False,
        debug: bool = False,
        reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Save:
        """Take a snapshot and hand it over. On return, whatever an optimizer does not own may be changed; the optimizer
        step itself is held, by its hook or :meth:`fence`, until the rest is copied.

        Inside gradient accumulation the snapshot is taken at the next boundary, and the handle is ``deferred`` till
        then. A repeated save of a step returns the first one's handle. All ranks save the same steps. Several ranks
        that do not wait leave some out where the store is behind; ``pin`` and ``debug`` ones are tried in any case.
        ``debug``: for a post-mortem, such as the state in which an anomaly was seen: restored by its step, or where
        there is no other.

        Raises :class:`ckptd.errors.StateError` for a state that cannot be saved, before anything is written;
        :class:`UsageError` for a call out of order. Everything else that fails ends on the handle.
        """
        self._check_open()
        check_step(step)
        for name, value in (metrics or {}).items():
            check_metric(step, name, value)
        numbers = metrics_for_record(metrics or {})
        # A rank that is alone stops at its next step, which is this one's.
        stops = self._schedule.appointments.stops(step) or (self._world == 1 and bool(stopping.ASKED.by))
        save = self._request(step, reason or "", numbers, last=stops, pin=pin, debug=debug)
        if isinstance(save.error, StateError):
            raise save.error
        return save

    def _request(self, step: int, reason: str, metrics: Mapping[str, float | None], **kinds: bool) -> Save:
        self._open_life(None, fresh=False)
        return self._saving.request(step, reason, metrics, **kinds)

    def fence(self) -> None:
        """Wait until no copy is in flight, before parameters or optimizer state are changed by something that torch's
        optimizer hooks do not see."""
        self._stager.wait()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was handed over is committed, or has failed. ``timeout`` in seconds.

        Then raises the oldest error of those that failed meanwhile; :class:`DeadlineExceeded` when the time is up.
        """
        failed = self._await_ends(timeout)
        if failed is not None and failed.error is not None:
            raise failed.error

    def _await_ends(self, timeout: float | None) -> Save | None:
        with self._link.pulse.phase(Phase.SAVE):
            # Those that only the next boundary takes wait for the training, not for the daemon.
            awaited = [save for save in self._handles.unfinished() if save.state != "deferred"]
            self._stager.wait()
            return await_ends(awaited, timeout)

    # Progress

    def phase(self, name: PhaseName, *, limit_seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        """``with ckpt.phase("eval", limit_seconds=1800):`` What happens inside is no training step, and may take so
        long before it counts as a hang; else as long as the daemon has learned, or an hour. ``eval``, ``compile``,
        ``save``, ``restore`` or ``other``; ranks that wait for the one that does it enter it as well. No system call.

        Raises :class:`ConfigError` for another name, and for a limit that is none.
        """
        self._check_open()
        return self._link.pulse.phase(*phase_named(name, limit_seconds))

    # Ending

    def _check_open(self) -> None:
        if self._over:
            raise UsageError(self._over)

    def close(self, timeout: float | None = CLOSE_SECONDS) -> None:
        """Wait until everything is committed, and end the session. Idempotent.

        Raises the error of the newest save if that failed, so that a run whose last checkpoint is missing does not end
        as if all were well; :class:`DeadlineExceeded` when ``timeout`` seconds are over (the daemon goes on).
        """
        if self._over:
            return
        self._saving.give_up_deferred()
        try:
            self._await_ends(timeout)
        finally:
            self._end()
        newest = self._handles.newest()
        if newest is not None and newest.error is not None:
            raise newest.error

    def _end(self) -> None:
        self._over = "the checkpointer is closed"
        self._progress.close()
        leaving.closed(self)
        self._snapshots.fence.close()
        self._stager.close()
        self._schedule.appointments.close()
        self._claim.close()
        self._link.close()
        self._supply.close()

    def abandon(self) -> None:
        """At the interpreter's exit without :meth:`close`: seal what is being copied; the daemon does the rest."""
        if not self._over:
            self._progress.close()
            self._stager.wait()

    def forget(self) -> None:
        """In a forked child: the session is the parent's."""
        self._over = "this is a forked child; the checkpointer belongs to its parent"
        self._link.forget()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The training's own error is the one to be seen, and soon: of ranks that are dead nothing comes that would
        # complete a checkpoint, and whoever starts them anew waits for this one. In an agreed stop none of them is.
        well = isinstance(error, stopping.Stopped) or (isinstance(error, SystemExit) and not error.code)
        together = self._world == 1 or well
        try:
            self.close(CLOSE_SECONDS if together else CLOSE_AFTER_ERROR_SECONDS)
        except CkptdError as second:
            _log.error("while the training ended with an error: %s", second)
