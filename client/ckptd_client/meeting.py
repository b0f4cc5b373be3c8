"""Where the ranks of one start leave values for each other: in memory, in torch's store, in the run's own storage."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, Protocol

from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_delay

from ckptd.errors import AlreadyExists, ConfigError, DeadlineExceeded, NotFound, first_line
from ckptd.format.digests import hex_digest
from ckptd.format.keys import AGREEMENT
from ckptd.jitter import backoff_seconds
from ckptd.limits import SMALL_RECORD_BYTES_MAX
from ckptd_client.blocking import run_blocking
from ckptd_client.roots import Root
from ckptd_client.topology import LAUNCH_VARIABLE


class Store(Protocol):
    """A place where ranks leave values for each other. A key is written once."""

    def put(self, key: str, value: bytes) -> None:
        """Leave a value."""
        ...

    def get(self, key: str, deadline_seconds: float) -> bytes:
        """Wait for a value. Raises :class:`DeadlineExceeded`."""
        ...

    def peek(self, key: str) -> bytes | None:
        """The value if it is there now."""
        ...


class OwnStore:
    """For a single rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        self._values[key] = value

    def get(self, key: str, deadline_seconds: float) -> bytes:
        """See :class:`Store`."""
        return self._values[key]

    def peek(self, key: str) -> bytes | None:
        """See :class:`Store`."""
        return self._values.get(key)


class TorchStore:
    """A ``torch.distributed.Store``: torchrun's, or the process group's."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Store`."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline_seconds: float) -> bytes:
        """See :class:`Store`."""
        full = self._prefix + key
        try:
            self._store.wait([full], timedelta(seconds=max(deadline_seconds, 0.001)))
        except (RuntimeError, ValueError) as error:  # torch has no narrower type for its time-out
            raise DeadlineExceeded(f"no {key} in torch's store: {first_line(error)}") from None
        return bytes(self._store.get(full))

    def peek(self, key: str) -> bytes | None:
        """See :class:`Store`."""
        full = self._prefix + key
        return bytes(self._store.get(full)) if self._store.check([full]) else None


class StorageStore:
    """The run's own storage, for processes that share nothing but a launch id.

    Whatever was left there stays, so an earlier start of the same launch id must not be taken for this one: each value
    carries a mark of the process that left it, and who finds a value of another process in its place refuses.
    """

    def __init__(self, root: Root, number: int, world: int) -> None:
        self._root = root
        # With the world: where it has grown, the new ranks would find answers and no value in their own place.
        self._prefix = f"{AGREEMENT}{hex_digest(f'{root.launch}/{number}/{world}'.encode())}/"
        self._mark = uuid.uuid4().bytes

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Store`. Raises :class:`ConfigError` where an earlier start has left one."""

        async def write() -> None:
            async with self._root.visit() as backend:
                await backend.put(self._prefix + key, self._mark + value, if_absent=True)

        try:
            run_blocking(write())
        except AlreadyExists:
            if self._read(key) != self._mark + value:
                raise ConfigError(
                    f"{self._root.url}: an earlier start was also called {self._root.launch!r}",
                    hint=f"give each start another {LAUNCH_VARIABLE}, the same on all ranks, such as job and attempt",
                ) from None

    def get(self, key: str, deadline_seconds: float) -> bytes:
        """See :class:`Store`."""
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(NotFound),
                stop=stop_after_delay(deadline_seconds),
                wait=lambda state: backoff_seconds(state.attempt_number, 0.05, 0.5),
            ):
                with attempt:
                    return self._read(key)[len(self._mark) :]
        except RetryError:
            pass
        raise DeadlineExceeded(f"no {key} in {self._root.url}")

    def peek(self, key: str) -> bytes | None:
        """See :class:`Store`."""
        try:
            return self._read(key)[len(self._mark) :]
        except NotFound:
            return None

    def _read(self, key: str) -> bytes:
        async def read() -> bytes:
            async with self._root.visit() as backend:
                return await backend.get(self._prefix + key, limit_bytes=SMALL_RECORD_BYTES_MAX)

        return run_blocking(read())
