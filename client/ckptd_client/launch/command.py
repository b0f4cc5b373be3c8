"""The command line of ``ckptd run``: torchrun's, and what is ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from ckptd.errors import CkptdError, ConfigError, DeadlineExceeded
from ckptd.wire.channel import SOCKET_VARIABLE, default_socket
from ckptd_client.launch.agent import NO_ID, RESTARTS_UNLIMITED, as_agent_of_torchrun
from ckptd_client.launch.journal import Journal
from ckptd_client.launch.lookout import Lookout
from ckptd_client.launch.policy import RestartRules
from ckptd_client.launch.processes import adopt_orphans
from ckptd_client.launch.supervisor import Supervisor
from ckptd_client.stopping import LAUNCHER_VARIABLE, STOP_SIGNALS, STOP_VARIABLE
from ckptd_client.topology import LAUNCH_VARIABLE

STOP_SECONDS = 25.0
"""Below the half minute that Kubernetes and torchrun leave."""


def run(argv: Sequence[str]) -> None:
    """Run a training until it is done. Returns then.

    Raises :class:`ckptd.errors.TrainingStopped`, :class:`ckptd.errors.CrashLoop`, :class:`ckptd.errors.NeverStarted`,
    :class:`ckptd.errors.RestartsUsedUp`, :class:`ckptd.errors.RendezvousLost`; :class:`ConfigError`;
    :class:`ckptd.errors.DaemonError`.
    """
    args = _parsed(argv)
    rules = _rules(args)
    _prepare(args)
    socket = args.socket or default_socket()
    os.environ[SOCKET_VARIABLE] = str(socket)
    os.environ[STOP_VARIABLE] = ",".join(STOP_SIGNALS)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    adopt_orphans()
    journal = Journal(args.events)
    supervisor = Supervisor(rules, Lookout(socket.absolute()), journal, stop_seconds=args.stop_deadline)
    family = os.environ.get(LAUNCH_VARIABLE, "")
    try:
        with as_agent_of_torchrun(supervisor, family):
            torchrun.run(args)  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]
    except ChildFailedError as error:
        raise supervisor.outcome or CkptdError(f"the training failed: {error}") from None
    except (RendezvousError, DistError, DeadlineExceeded) as error:
        supervisor.clear()
        raise supervisor.left_alone(error) from error
    finally:
        journal.close()


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Raises :class:`ConfigError`, in one line and without the usage of some eighty options."""
    parser = _parser()

    def refuse(message: str) -> NoReturn:
        option, ambiguous, matches = message.removeprefix("ambiguous option: ").partition(" could match ")
        if ambiguous:  # torchrun has each of its options in two spellings
            spelled = dict.fromkeys(match.replace("_", "-") for match in matches.split(", "))
            message = f"{option} may be short for {' or '.join(spelled)}"
        raise ConfigError(f"ckptd run: {message}", hint="`ckptd run --help` lists the options; write them out")

    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    try:
        torchrun.determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ConfigError(
            f"ckptd run: --nproc-per-node {args.nproc_per_node}: {error}", hint="a number, or auto, gpu or cpu"
        ) from None
    try:
        torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"ckptd run: --nnodes {args.nnodes}: {error}", hint="a number, or least:most") from None
    return args


def _parser() -> argparse.ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "ckptd run"
    usual = RestartRules()
    ours = parser.add_argument_group("ckptd")
    ours.add_argument("--socket", type=Path, help=f"The daemon's socket; else ${SOCKET_VARIABLE}.")
    ours.add_argument("--events", type=Path, help="Append what happens to this file, as JSON lines.")
    ours.add_argument(
        "--stop-deadline",
        type=float,
        default=STOP_SECONDS,
        help="Seconds from SIGTERM, SIGUSR1, SIGUSR2 or Ctrl-C for a last save (default: %(default)g).",
    )
    ours.add_argument(
        "--restart-window",
        type=float,
        default=usual.window_seconds,
        help="Seconds within which --max-restarts counts (default: %(default)g).",
    )
    ours.add_argument(
        "--same-step-failures",
        type=int,
        default=usual.same_step_max,
        help="Failures in a row at one step until the restart goes one checkpoint back (default: %(default)s).",
    )
    ours.add_argument(
        "--backoff",
        type=float,
        default=usual.backoff_seconds,
        help="Seconds before a second restart, at most; doubles for each further one (default: %(default)g).",
    )
    parser.set_defaults(max_restarts=usual.restarts_max)
    return parser


def _rules(args: argparse.Namespace) -> RestartRules:
    if args.max_restarts < 0 or args.same_step_failures < 1 or args.backoff < 0 or args.stop_deadline < 0:
        raise ConfigError("ckptd run: numbers of restarts, failures and seconds are not negative")
    return RestartRules(
        restarts_max=args.max_restarts,
        window_seconds=args.restart_window,
        same_step_max=args.same_step_failures,
        backoff_seconds=args.backoff,
    )


def _prepare(args: argparse.Namespace) -> None:
    """What torchrun is to do otherwise than by its own defaults."""
    if args.run_path:
        raise ConfigError("--run-path runs the script inside of torchrun's own processes", hint="leave it out")
    _, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if most == 1 and args.rdzv_backend == "static" and args.master_port is None:
        args.standalone = args.standalone or not args.rdzv_endpoint  # a port of its own, and an id
    named = args.rdzv_id != NO_ID or LAUNCH_VARIABLE in os.environ
    if not named and not args.standalone and args.rdzv_backend != "static":  # there the nodes agree on one
        raise ConfigError(
            "several nodes need a name for their launch", hint="--rdzv-id, the same on all, such as the job's"
        )
    args.max_restarts = RESTARTS_UNLIMITED
