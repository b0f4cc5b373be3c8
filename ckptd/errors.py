"""Every error ckptd raises on purpose, in one tree.

An error says what happened in its message, what to do in ``hint``, whether the same call may succeed later in
``retryable``, and with which status a command ends in ``exit_code``. Foreign exceptions stop at the adapter that met
them and become one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar, cast

from ckptd.exits import Exit

NEAR_MAX = 3
"""How many names an error gives for one that is not there."""


class CkptdError(Exception):
    """The root. ``hint``: one sentence for the operator, or empty."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = Exit.ERROR

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(CkptdError):
    """The caller asked for something that cannot be: a bad argument, a call out of order."""

    exit_code = Exit.USAGE


class ConfigError(UsageError):
    """A setting is missing, malformed or contradicts another."""


# What lies in storage


class StorageError(CkptdError):
    """A backend could not do what was asked. ``key`` names the object, or the root where there is none."""

    exit_code = Exit.STORE

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message, hint=hint)
        self.key = key


class NotFound(StorageError):
    """The store says that no such object exists. Never used where the store could not tell."""


class AlreadyExists(StorageError):
    """A put that had to be the first found an object there. Whether it is ours is for the caller to find out."""


class ShortRead(StorageError):
    """The object ends before the bytes that were asked for."""


class TooLarge(StorageError):
    """The object is larger than the limit that the caller gave, or than the store takes."""


class AccessDenied(StorageError):
    """The store refused: credentials, permissions, a read-only file system."""


class StorageFull(StorageError):
    """No room: disk full, quota, or the store's own limit."""


class ClockSkewed(StorageError):
    """The store refuses requests because this machine's clock is wrong; the message has both times."""


class Unavailable(StorageError):
    """The store did not answer, or asked to come again later. The outcome of a write is unknown."""

    retryable = True


class NoProgress(Unavailable):
    """A store has been silent for so long that to try again at once is of no use."""

    retryable = False


class CredentialsExpired(Unavailable):
    """The credentials ran out; they are resolved anew on the next attempt."""


# What the bytes mean


class FormatError(CkptdError):
    """Bytes that are not what the format specification allows."""

    exit_code = Exit.FORMAT


class UnsupportedFormat(FormatError):
    """A later format version than this release can read."""


class IntegrityError(CkptdError):
    """Bytes that differ from what their digest, size or receipt promises."""

    exit_code = Exit.DAMAGED


class CoverageError(CkptdError):
    """The pieces of a tensor do not cover it exactly once, so nothing is committed."""

    exit_code = Exit.DAMAGED


class NoCheckpoint(CkptdError):
    """Nothing that was asked for exists, and the store was able to say so."""

    exit_code = Exit.NO_CHECKPOINT


class MismatchError(CkptdError):
    """The checkpoint and the live state do not fit: missing or unexpected names, other shapes or dtypes."""

    exit_code = Exit.MISMATCH


# Saving


class StateError(CkptdError):
    """The state holds something that cannot be saved; the message names its path. Nothing was written."""

    exit_code = Exit.MISMATCH


class SaveError(CkptdError):
    """One save failed. Training goes on, and the next save starts afresh."""

    exit_code = Exit.SAVE


class SaveSkipped(SaveError):
    """The save did not take place: no free slot in time, or another rank skipped the step."""


class SnapshotVoided(SaveError):
    """The state changed while it was being copied; the message names the tensor. The copy was thrown away."""


class Superseded(SaveError):
    """A newer generation of the run exists; its owner is named. This one writes no more."""


class RunInUse(CkptdError):
    """A live owner holds the run, or this rank of it. ``takeover=True`` takes it away."""

    exit_code = Exit.IN_USE


# Processes


class DaemonError(CkptdError):
    """The daemon cannot be reached, refused, or went away."""

    retryable = True
    exit_code = Exit.NO_DAEMON


class ProtocolError(DaemonError):
    """A message that the wire protocol does not allow."""

    retryable = False


class ResourceError(CkptdError):
    """Not enough memory, descriptors or locked pages here; the message has the figures."""

    exit_code = Exit.RESOURCES


class ProverEnded(ResourceError):
    """The process that proves a commit was ended by something else. Nothing is lost: the receipts lie in storage."""

    retryable = True


class DeadlineExceeded(CkptdError):
    """A bounded wait ran out; the message names what was awaited and who is late."""

    retryable = True
    exit_code = Exit.DEADLINE


# How a training under ``ckptd run`` ends


class TrainingStopped(CkptdError):
    """It was asked to stop, and has saved. Start it again, and it goes on."""

    retryable = True
    exit_code = Exit.STOPPED


class CrashLoop(CkptdError):
    """It fails at the same step again and again, from older checkpoints too. Another start will fail alike."""

    exit_code = Exit.CRASH_LOOP


class NeverStarted(CkptdError):
    """It fails before its first step: a mistake in the script, its arguments or its surroundings."""

    exit_code = Exit.NEVER_STARTED


class RestartsUsedUp(CkptdError):
    """It was restarted as often as it may be. Its checkpoints are sound, as far as anybody knows."""

    exit_code = Exit.RESTARTS_USED_UP


class RendezvousLost(CkptdError):
    """A further start was wanted, and its nodes cannot meet any more. Start it again on all of them, and it goes on."""

    retryable = True
    exit_code = Exit.RENDEZVOUS_LOST


def to_fields(error: BaseException, foreign: type[CkptdError] = CkptdError) -> dict[str, str]:
    """An error as plain data: the name of its class here, its message and its hint. One of another library becomes a
    ``foreign``."""
    if isinstance(error, CkptdError):
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": foreign.__name__, "message": first_line(error), "hint": ""}


def from_fields(error: str, message: str, hint: str, unknown: type[CkptdError] = CkptdError) -> CkptdError:
    """The inverse of :func:`to_fields`; a class that this release lacks becomes an ``unknown``."""
    kind = globals().get(error)
    if not (isinstance(kind, type) and issubclass(kind, CkptdError)):
        kind = unknown
    return kind(message, hint=hint)


def near(word: str, known: Iterable[str]) -> list[str]:
    """Which of the known words may have been meant, the nearest first; at most :data:`NEAR_MAX`."""
    return get_close_matches(word, list(dict.fromkeys(known)), n=NEAR_MAX, cutoff=0.5)  # s4 is as near as that to s3


def meant(word: str, known: Iterable[str]) -> str:
    """What to add to a hint where a word is not known; empty where none that is known is near."""
    found = near(word, known)
    return f"; or is {' or '.join(found)} meant?" if found else ""


def first_of(error: Exception) -> Exception:
    """The first error of a group, however deep; any other error itself."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error


def first_line(error: BaseException) -> str:
    """``Type: message`` for a log line or a wire message, without secrets or traceback."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, CkptdError) else f"{type(error).__name__}: {text}"
