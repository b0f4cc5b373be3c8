"""The one interface to storage: an object store, not a file system.

A backend is bound to a root (a run, usually) and knows keys below it. There is no rename, no directory and no append:
a commit is an object that appears. Data goes in as a view of memory that can be read again, so that retries and
parallel parts need no stream type and no copy.

Retry, concurrency and bandwidth limits, tracing and faults are wrappers of this same interface, never part of a
backend. The conformance suite, ``ckptd_backends.testing``, states every promise below as a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable
from urllib.parse import urlsplit

from ckptd.errors import ConfigError, UsageError, meant
from ckptd.format.keys import KEY_PATTERN
from ckptd.pace import Pace

StorageOptions = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of one object."""

    key: str
    """Relative to the backend's root."""
    size_bytes: int
    modified_seconds: float
    """Unix time by the *store's* clock; the only clock that deletion may use."""
    checksum: str = ""
    """A checksum that the store verified on arrival (S3: the CRC32C of each part, ``crc32c:<hex>,<hex>,…``), or
    empty. ``head`` may know only the checksum over those, ``crc32c-of:<hex>-<parts>``."""
    path_taken: str = ""
    """How the bytes went: ``direct``, ``buffered``, ``single``, ``multipart`` …; for the save's statistics."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a backend, not wishes."""

    put_if_absent: bool
    """``put(if_absent=True)`` lets exactly one of any number of writers win."""
    inflight_max: int
    """Blocking operations that may run at once."""
    part_bytes: int
    """Size of the parts in which large data is read from its source; a multiple of 4096."""
    survives_power_loss: bool
    """Durable on return holds against power loss, not only against the death of processes."""


@runtime_checkable
class Source(Protocol):
    """Bytes that may still be arriving, as in a slot that is being filled."""

    @property
    def view(self) -> memoryview:
        """All of the bytes, read-only, contiguous; those not yet ready may still change."""
        ...

    async def ready(self, start: int, stop: int) -> None:
        """Return once ``view[start:stop]`` is final. Raises to abandon the put. May be called again for a retry."""
        ...

    async def complete(self) -> None:
        """Called after the last part was read and before the object becomes visible. Raises to abandon the put."""
        ...


@runtime_checkable
class ReleasableSource(Source, Protocol):
    """A source that holds only what is being read of it, and so takes less memory than the object."""

    def stored(self, start: int, stop: int) -> None:
        """The store has ``view[start:stop]``: until ``ready`` is awaited for it again, it may change."""
        ...


class Backend(Protocol):
    """Objects under one root. Safe to use from any number of tasks of one event loop."""

    @property
    def url(self) -> str:
        """The root, without secrets; for messages."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        """Store one object. Atomic: readers see all of it or nothing. Durable on return.

        With a :class:`Source`, ``ready`` is awaited before each part is read and ``complete`` before the object
        becomes visible; a :class:`ReleasableSource` is told of each part that need not be read again, where the backend
        reads in parts. May be called again with the same bytes. Keeps no reference to ``data`` after it returned or
        raised, and a put that failed or was cancelled leaves nothing visible and no temporary behind, unless the
        process dies, or the store hangs (:class:`NoProgress`): then ``data`` is still read, to no effect, and what is
        left goes when the store comes back. Only a put that fails or is cancelled *while* the object becomes visible
        may leave it there: read it back.

        Raises :class:`AlreadyExists` where ``if_absent`` and any object is there, whoever wrote it.
        """
        ...

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        """A small object, whole. Raises :class:`TooLarge` over the limit, never truncates; :class:`NotFound`."""
        ...

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """Fill ``out`` exactly with the bytes from ``offset`` on, or raise :class:`ShortRead`. Empty ``out``: a no-op
        that still raises :class:`NotFound`."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Raises :class:`NotFound` only where the store says so, not where it could not tell."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with ``prefix`` (empty, or ending in ``/``), in order of key. A hint, never a
        proof of absence: a store may list late. Temporaries and foreign names are left out."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Idempotent: a missing object is a success. Failures are collected into one :class:`ExceptionGroup`."""
        ...

    async def aclose(self) -> None:
        """Idempotent. Waits for what is in flight."""
        ...


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check learned, about a store or a machine."""

    level: Level
    subject: str
    """What was tried, in a few words: ``conditional put``, ``clock``, ``route`` …"""
    message: str
    hint: str = ""


@runtime_checkable
class SelfTesting(Protocol):
    """A backend that can find out whether its store keeps its word. Wrappers pass this on."""

    async def self_test(self) -> list[Finding]:
        """Try with probe objects of its own, and remove them. What is wrong with the store is an error among the
        findings; only what kept the test itself from running is raised. May change :attr:`Backend.capabilities`."""
        ...


@runtime_checkable
class LeavingUploads(Protocol):
    """A backend whose store keeps the parts of uploads that were never completed. Wrappers pass this on."""

    async def abort_stale_uploads(self) -> int:
        """Abort the journaled uploads below this root whose writer is dead, and own ones whose abort failed before.
        Returns how many. To be called at start; never touches what a live writer is sending. Failures
        are collected into one :class:`ExceptionGroup`, and tried again the next time."""
        ...


@runtime_checkable
class Settling(Protocol):
    """A backend whose objects are seen a moment before they are durable, and gone from sight before they are gone for
    good. Where a writer ends in between, nobody may build on what is seen yet. Wrappers pass this on."""

    async def settle(self, key: str) -> None:
        """What is seen at ``key`` and beside it is durable on return, and what is not seen there is gone for good."""
        ...


async def settle(backend: Backend, key: str) -> None:
    """As :meth:`Settling.settle`. Nothing, where the backend shows only what is durable."""
    if isinstance(backend, Settling):
        await backend.settle(key)


class Factory(Protocol):
    """What an entry point in the group ``ckptd.backends`` names, by URL scheme."""

    def __call__(
        self, url: str, options: StorageOptions, *, state_dir: Path | None, threads_max: int | None
    ) -> Backend: ...


def check_key(key: str) -> None:
    """Raise :class:`UsageError` unless ``key`` fits the format's key grammar (segments of ``[A-Za-z0-9._=-]``)."""
    if KEY_PATTERN.fullmatch(key) is None:
        raise UsageError(f"not a key of the format: {key!r}")


def check_prefix(prefix: str) -> None:
    """Raise :class:`UsageError` unless ``prefix`` is empty, or a key followed by ``/``."""
    if prefix and not (prefix.endswith("/") and KEY_PATTERN.fullmatch(prefix[:-1])):
        raise UsageError(f"not a prefix of keys of the format: {prefix!r}", hint="it is empty or ends in '/'")


def normal_url(url: str) -> str:
    """The one spelling of a root: a scheme always, absolute paths, no trailing slash. A bare path is ``file://``.

    Raises :class:`ConfigError` for what can be no run's root: nothing at all, the file system's own root, a file on
    another host, credentials.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        if separator and rest.strip() and not rest.startswith(("/", "~", "{")):
            raise ConfigError(
                f"{url!r} names a host, {rest.partition('/')[0]!r}, and no folder of this machine",
                hint=f"an absolute path has three slashes: file:///{rest}",
            )
        path = Path(rest if separator else url)
        if not str(rest if separator else url).strip() or path.absolute() == Path("/"):
            raise ConfigError(f"{url!r} names no folder for a run", hint="give one, such as file:///data/runs/gpt")
        return f"file://{path.expanduser().absolute()}"
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(
            f"{scheme}://… carries credentials in the URL", hint="pass them by storage_options or the environment"
        )
    return url.rstrip("/") if rest.strip("/") else url


def open_backend(
    url: str,
    options: StorageOptions | None = None,
    *,
    state_dir: Path | None = None,
    threads_max: int | None = None,
) -> Backend:
    """The backend for a root URL, found by its scheme among the installed entry points.

    ``options``: what the backend understands, such as ``endpoint_url`` for S3; unknown names are refused.
    ``state_dir``: a private local folder where a backend may journal what it must clean up after a crash (S3 upload
    ids); ``None`` for readers. ``threads_max``: so many blocking calls at once, whatever the options allow; ``None``:
    what they allow. No request is made and no connection opened yet.
    """
    url = normal_url(url)
    scheme = url.split("://", 1)[0]
    found = _installed("ckptd.backends")
    point = found.get(scheme) or found.get("fsspec")
    if point is None:
        raise ConfigError(
            f"no backend for {scheme}:// is installed; known: {', '.join(sorted(found)) or 'none'}",
            hint=f"install the extra that brings it, such as ckptd[s3] or ckptd[fsspec]{meant(scheme, found)}",
        )
    try:
        factory = cast(Factory, point.load())
    except ImportError as error:
        raise ConfigError(
            f"the backend for {scheme}:// needs a package that is not installed: {error.name}",
            hint=f"pip install 'ckptd[{point.name}]'{meant(scheme, found)}",
        ) from error
    return factory(url, options or {}, state_dir=state_dir, threads_max=threads_max)


def preload(scheme: str = "file") -> None:
    """Look for the installed backends, and import the one for a scheme where there is one: some tens of milliseconds,
    which the first to open one would else have to wait."""
    for group, name in (("ckptd.backends", scheme), ("ckptd.wrappers", "standard")):
        with contextlib.suppress(ImportError):  # said to whoever wants it
            if (point := _installed(group).get(name)) is not None:
                point.load()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one backend may take. ``None``: no limit beyond the backend's own."""

    operations_max: int | None = None
    """Operations at once."""
    up: Pace | None = None
    """Paid for what is written, by all backends with the same one together."""
    down: Pace | None = None
    """For what is read, likewise."""


def with_standard_wrappers(backend: Backend, limits: Limits) -> Backend:
    """``backend`` with retries, limits and tracing around it: what production uses. The entry point ``standard`` in
    the group ``ckptd.wrappers``."""
    wrap = cast(Callable[[Backend, Limits], Backend], _installed("ckptd.wrappers")["standard"].load())
    return wrap(backend, limits)


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    """Looked up once: it reads the metadata of every installed package."""
    return {point.name: point for point in entry_points(group=group)}
