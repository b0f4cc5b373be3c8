"""Every message, typed. JSON objects with the member ``type``; unknown types are refused.

A request carries a number, and its reply carries the same. Events carry none: the daemon sends them when they happen.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ckptd.errors import CkptdError, DaemonError, ProtocolError, from_fields, to_fields
from ckptd.format.records import Generation, Rank, Size, Step, World
from ckptd.limits import MESSAGE_BYTES_MAX, SLOTS_MAX

PROTOCOL = 3

SlotNumber = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS_MAX)]


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """What all messages have in common: their type."""


class Request(Message, kw_only=True, frozen=True):
    """A message that is answered, or an answer."""

    request: Size = 0


class SlotRef(msgspec.Struct, kw_only=True, frozen=True):
    """One fill of one slot."""

    arena: str
    slot: SlotNumber
    ticket: Size


class SnapshotOffer(msgspec.Struct, kw_only=True, frozen=True):
    """A snapshot that can be restored from memory."""

    arena: str
    slot: SlotNumber
    ticket: Size
    run: str
    """The run's id. Another run may have taken the place since."""
    step: Step
    generation: Generation
    world: World
    rank: Rank
    unhealthy: bool = False
    """Not all of its values are finite."""
    writable: bool
    """The arena is this rank's own and nobody else writes into it: it may be borrowed to write in as well."""
    debug: bool = False
    """Saved for a post-mortem: not to be restored by itself."""


class TierOfRun(msgspec.Struct, kw_only=True, frozen=True):
    """A root of the run, and what is to go there."""

    url: str
    keep: dict[str, Any] = {}
    """The retention policy there; see :class:`ckptd.checkpoint.keep.Keep`."""
    storage_options: dict[str, Any] = {}
    """Secrets may be in here: never logged, never written."""
    shared: bool = True
    """All ranks see the same place; else each node has a disk of its own."""
    every_steps: int | None = None
    every_seconds: float | None = None


# Trainer → daemon


class Hello(Request, kw_only=True, frozen=True, tag="hello"):
    """Opens a session: this process is rank ``rank`` of a run. Answered by Welcome or Refused."""

    protocol: int
    tiers: tuple[TierOfRun, ...]
    """Nearest first. At least one is shared where there are several ranks."""
    rank: Rank
    world: World
    launch: str
    takeover: bool = False
    """Take the rank away from a living owner."""
    loader: dict[str, Any] | None = None
    """What really loads a checkpoint, for a trial; see :class:`ckptd.checkpoint.trial.Loader`. For the daemon's own
    user only."""
    load_every: Size = 1
    """Of so many commits, one is loaded."""
    incremental: bool = True
    """What is unchanged since an older checkpoint is referred to and not stored again."""
    on_bad_loss: Literal["nothing", "alert", "pin", "go_back"] = "nothing"
    loss_rules: dict[str, Any] = {}
    """See :class:`ckptd.pulse.loss_rules.LossRules`."""


class MakeArena(Request, kw_only=True, frozen=True, tag="make_arena"):
    """Answered by ArenaGranted, with the descriptor, or Refused."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_MAX)]
    slot_bytes: Size
    only_ready: bool = False
    """Refused, unless there is one already that nobody has."""


class ListOffers(Request, kw_only=True, frozen=True, tag="list_offers"):
    """Which snapshots of this run, of whichever rank, are in memory? Answered by Offers."""


class BorrowArena(Request, kw_only=True, frozen=True, tag="borrow_arena"):
    """Asks for an arena that a predecessor of this rank left; ``read_only``, for one of any rank of the run. Answered
    by ArenaGranted, with the descriptor."""

    arena: str
    read_only: bool = False


class HandArena(Request, kw_only=True, frozen=True, tag="hand_arena"):
    """Carries the descriptor of an arena that this trainer has mapped, for a daemon that was restarted. Answered by
    Done; sealed slots are then finished."""

    arena: str


class HandWatched(Message, kw_only=True, frozen=True, tag="hand_watched"):
    """Carries a descriptor of what the daemon needs to watch over this trainer; see :mod:`ckptd.pulse`. Once for each
    part, the page last. ``rows``: of its training log, where it has one."""

    part: Literal["page", "stacks", "dump", "end", "rows"]
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """What pulling ``dump`` raises in the trainer, and would in processes that were forked from it."""


class DropArena(Request, kw_only=True, frozen=True, tag="drop_arena"):
    """The trainer needs the arena no longer; it goes when its slots are durable. Answered by Done."""

    arena: str


class Filling(Message, kw_only=True, frozen=True, tag="filling"):
    """The snapshot record lies in the slot, and the shard's bytes are being copied."""

    at: SlotRef


class Filled(Message, kw_only=True, frozen=True, tag="filled"):
    """The shard's first ``bytes`` bytes are final."""

    at: SlotRef
    bytes: Size


class Sealed(Message, kw_only=True, frozen=True, tag="sealed"):
    """The snapshot is complete and checked."""

    at: SlotRef
    not_finite: tuple[str, ...] = ()
    """Some of the tensors that hold values which are not finite, where that was looked for."""


class Voided(Message, kw_only=True, frozen=True, tag="voided"):
    """The fill was given up; nothing of it may become visible."""

    at: SlotRef
    reason: str


class Skip(Message, kw_only=True, frozen=True, tag="skip"):
    """This rank takes no part in a step that was due; the other ranks are to let go."""

    step: Step
    generation: Generation
    run: str
    reason: str


class AwaitIdle(Request, kw_only=True, frozen=True, tag="await_idle"):
    """Answered by Done when no save of this run, of whichever rank, is in flight, or the time is up (Refused)."""

    deadline_seconds: float


class GetStatus(Request, kw_only=True, frozen=True, tag="get_status"):
    """Answered by Status. Needs no Hello."""


class GetLives(Request, kw_only=True, frozen=True, tag="get_lives"):
    """How far did the trainers of a launch come? Answered by Lives. Needs no Hello."""

    launch: str


class Doubt(Request, kw_only=True, frozen=True, tag="doubt"):
    """What the trainers of this launch, which are over, had restored does not do: mark it suspect, in every tier that
    has it, so that the next restore takes the one before. Answered by Doubted. Needs no Hello."""

    launch: str
    reason: str


class Drain(Request, kw_only=True, frozen=True, tag="drain"):
    """Finish what is sealed and end. Answered by Done when all is committed, or Refused with what is not. Needs no
    Hello."""

    deadline_seconds: float


# Daemon → trainer


class Welcome(Request, kw_only=True, frozen=True, tag="welcome"):
    """The session is open."""

    pid: int
    version: str


class Offers(Request, kw_only=True, frozen=True, tag="offers"):
    """Snapshots of this run that are in memory, newest first."""

    offers: tuple[SnapshotOffer, ...]


class Refused(Request, kw_only=True, frozen=True, tag="refused"):
    """An error, as the answer to whichever request."""

    error: str
    """The name of a class in :mod:`ckptd.errors`."""
    message: str
    hint: str = ""


class Done(Request, kw_only=True, frozen=True, tag="done"):
    """It is done; there is nothing more to say."""


class ArenaGranted(Request, kw_only=True, frozen=True, tag="arena_granted"):
    """Carries the descriptor of the arena."""

    arena: str


class Status(Request, kw_only=True, frozen=True, tag="status"):
    """What the daemon is doing, for people and programs."""

    status: dict[str, Any]


class TrainerLife(msgspec.Struct, kw_only=True, frozen=True):
    """One trainer process, from its session on. Times in nanoseconds of this machine's monotonic clock; 0: not yet."""

    run: str
    rank: Rank
    world: World
    launch: str
    pid: int
    generation: Size
    began_ns: Size
    restoring_ns: Size
    restored_ns: Size
    first_step_ns: Size
    ended_ns: Size
    last_step: Size
    steps: Size
    """Seen of it."""


class Lives(Request, kw_only=True, frozen=True, tag="lives"):
    """Trainers of one launch on this node, in the order in which they ended, then those that live."""

    lives: tuple[TrainerLife, ...]


class Doubted(Request, kw_only=True, frozen=True, tag="doubted"):
    """What was marked."""

    version: str
    """Empty: they had restored nothing."""


class Durable(Message, kw_only=True, frozen=True, tag="durable"):
    """The shard and its receipt are durable; the slot may be reused."""

    at: SlotRef
    stats: dict[str, float | str]
    """queue_seconds, write_seconds, bytes, referenced_bytes, path."""


class Committed(Message, kw_only=True, frozen=True, tag="committed"):
    """The manifest exists."""

    step: Step
    generation: Generation
    stats: dict[str, float | str]
    """commit_seconds."""


class Failed(Message, kw_only=True, frozen=True, tag="failed"):
    """A save failed, at whichever stage. The slot may be reused."""

    step: Step
    generation: Generation
    stage: str
    error: str
    message: str
    hint: str = ""


Incoming = (
    Hello
    | MakeArena
    | ListOffers
    | BorrowArena
    | HandArena
    | HandWatched
    | DropArena
    | Filling
    | Filled
    | Sealed
    | Voided
    | Skip
    | AwaitIdle
    | GetStatus
    | GetLives
    | Doubt
    | Drain
)
"""What a daemon receives."""
Outgoing = Welcome | Refused | Done | Offers | ArenaGranted | Status | Lives | Doubted | Durable | Committed | Failed
"""What a trainer receives."""


class _Numbered(msgspec.Struct):
    request: Size = 0


_numbered = msgspec.json.Decoder(_Numbered)
_incoming = msgspec.json.Decoder(Incoming)
_outgoing = msgspec.json.Decoder(Outgoing)


def encode(message: Message) -> bytes:
    """Raises :class:`ProtocolError` over :data:`MESSAGE_BYTES_MAX`, and for a value that JSON cannot carry."""
    try:
        data = msgspec.json.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a message that JSON cannot carry: {error}") from None
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(data)} bytes, over the limit of {MESSAGE_BYTES_MAX}")
    return data


def decode_incoming(data: bytes) -> Incoming:
    """Raises :class:`ProtocolError` for whatever is not such a message."""
    try:
        return _incoming.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def request_number(data: bytes) -> int:
    """The number of a request, as far as it can be told of bytes that are no message; else 0."""
    try:
        return _numbered.decode(data).request
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return 0


def decode_outgoing(data: bytes) -> Outgoing:
    """Raises :class:`ProtocolError` for whatever is not such a message."""
    try:
        return _outgoing.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"not a message: {error}") from None


def refusal(request: int, error: BaseException) -> Refused:
    """An error as a reply."""
    return Refused(request=request, **to_fields(error, foreign=DaemonError))


def as_error(message: Refused | Failed) -> CkptdError:
    """The error that a message carries; a class that this release lacks becomes a :class:`DaemonError`."""
    return from_fields(message.error, message.message, message.hint, unknown=DaemonError)
