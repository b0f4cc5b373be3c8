"""Deleting many objects: in batches, or one by one where a store has no batches."""

from __future__ import annotations

from typing import Any

from ckptd.errors import AccessDenied, NotFound, StorageError, Unavailable
from ckptd_backends.s3_client import Requests
from ckptd_backends.s3_errors import error_code
from ckptd_backends.sources import Part, each_part, parts_of

BATCH_MAX = 1000
"""S3's own limit."""
_NO_BATCHES = {
    "NotImplemented",
    "MethodNotAllowed",
    "InvalidRequest",
    "MissingContentMD5",
    "InvalidDigest",
    "501",
    "405",
}


class Deletions:
    """Of one backend; remembers whether its store takes batches."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._batches = True

    async def run(self, keys: list[str]) -> list[Exception]:
        """Delete them all; returns what went wrong."""
        failures: list[Exception] = []
        for start, stop in parts_of(len(keys), BATCH_MAX):
            failures += await self._delete(keys[start:stop])
        return failures

    async def _delete(self, keys: list[str]) -> list[Exception]:
        names = {self._requests.place.name(key): key for key in keys}
        if self._batches:
            batch = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            try:
                answer = await self._requests.send("delete_objects", keys[0], Delete=batch)
            except StorageError as error:
                if error_code(error) not in _NO_BATCHES:
                    return [error]
                self._batches = False  # this store wants them one by one
            else:
                return [_not_deleted(names, failure) for failure in answer.get("Errors", [])]

        async def delete(index: int, _: Part) -> Exception | None:
            try:
                await self._requests.send("delete_object", keys[index], Key=self._requests.place.name(keys[index]))
            except NotFound:
                return None
            except StorageError as error:
                return error
            return None

        outcomes = await each_part(parts_of(len(keys), 1), self._requests.pool.threads, delete)
        return [outcome for outcome in outcomes if outcome is not None]


def _not_deleted(names: dict[str, str], failure: dict[str, Any]) -> StorageError:
    code = failure.get("Code", "")
    kind = (
        AccessDenied
        if code == "AccessDenied"
        else Unavailable
        if code in ("InternalError", "SlowDown")
        else StorageError
    )
    return kind(f"not deleted: {code}: {failure.get('Message', '')}", key=names.get(failure.get("Key", ""), ""))
