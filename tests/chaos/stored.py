"""What the storage of a run holds: whole checkpoints, each of one step, and nothing that a process left half done."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.errors import NoCheckpoint, NotFound
from ckptd.format.keys import Version, parse_version
from ckptd.format.records import Manifest, Receipt, Snapshot, decode
from ckptd.storage import Backend, Limits, open_backend, with_standard_wrappers
from devtools.seaweedfs import S3Endpoint
from tests.servers.proxied import raw_client

SHARD_BYTES_MAX = 1 << 28


class Broken(Exception):
    """Something that was promised does not hold."""


class Stored:
    """Looks at the run from outside, with connections of its own."""

    def __init__(self, url: str, server: S3Endpoint | None) -> None:
        self.url = url
        self.server = server
        self.checked: set[Version] = set()
        """Committed, and found to be whole and of one step."""
        self._open = contextlib.ExitStack()
        self._raw: Any = None

    @property
    def options(self) -> dict[str, object]:
        """Storage options for whoever is to use the run."""
        return {"part_bytes": 5 << 20, **self.server.options} if self.server else {"part_bytes": 65536}

    def committed(self) -> set[Version]:
        """Versions that have a manifest."""
        return {parse_version(name.removesuffix(".json")) for name in self._names() if "~" not in name}

    def _names(self) -> Iterator[str]:
        """Of manifests. Asked for many times a second."""
        if self.server is None:
            with contextlib.suppress(FileNotFoundError):
                yield from os.listdir(f"{self.url.removeprefix('file://')}/manifests")
            return
        prefix = f"{self.url.removeprefix(f's3://{self.server.bucket}/')}/manifests/"
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.server.bucket, Prefix=prefix)
        for page in pages:
            yield from (found["Key"].removeprefix(prefix) for found in page.get("Contents", []))

    def _client(self) -> Any:
        assert self.server is not None
        if self._raw is None:
            self._raw = self._open.enter_context(raw_client(self.server))
        return self._raw

    def close(self) -> None:
        """Give its connections back."""
        self._open.close()

    def check(self) -> set[Version]:
        """Look into every checkpoint that was not looked into before. All that are there.

        Raises :class:`Broken` for one that is not whole, or not of one step.
        """
        return asyncio.run(self._check())

    async def _check(self) -> set[Version]:
        present = self.committed()
        if fresh := sorted(present - self.checked, key=lambda version: (version.generation, version.step)):
            async with contextlib.aclosing(
                with_standard_wrappers(open_backend(self.url, self.options), Limits())
            ) as backend:
                run = await Run.open(backend)
                for version in fresh:
                    if problem := await _problem(run, version):
                        if version in self.committed():
                            raise Broken(f"{version} in storage: {problem}")
                        continue  # retention has taken it meanwhile
                    self.checked.add(version)
        return present

    def left_over(self) -> list[str]:
        """What no reader ever sees: files that are written aside, uploads that were not completed."""
        if self.server is not None:
            prefix = self.url.removeprefix(f"s3://{self.server.bucket}/")
            uploads = self._client().list_multipart_uploads(Bucket=self.server.bucket).get("Uploads", [])
            return [upload["Key"] for upload in uploads if upload["Key"].startswith(prefix)]
        # Not by rglob, which stumbles over what retention removes meanwhile.
        found = os.walk(self.url.removeprefix("file://"))
        return [f"{folder}/{name}" for folder, _, names in found for name in names if "~" in name]


async def _problem(run: Run, version: Version) -> str:
    """What is wrong with a checkpoint, in words."""
    try:
        found = await verify(run, version)
        return found.reason or await _mixture(run.backend, version)
    except (NoCheckpoint, NotFound) as error:
        return str(error)


async def _mixture(backend: Backend, version: Version) -> str:
    """Each number of the training in the shards, read by another library, is the step."""
    data = await backend.get(f"manifests/{version}.json", limit_bytes=SHARD_BYTES_MAX)
    looked_at = 0
    for ref in decode(data, Manifest).receipts:
        receipt = decode(await backend.get(ref.key, limit_bytes=SHARD_BYTES_MAX), Receipt)
        if decode(receipt.snapshot, Snapshot).step != version.step:
            return f"{ref.key} is of another step"
        shard = await backend.get(receipt.shard.key, limit_bytes=SHARD_BYTES_MAX)
        for name, tensor in load(shard).items():
            if tensor.dtype == torch.float32:
                looked_at += 1
                if not bool((tensor == version.step).all()):
                    return f"{name} holds {torch.unique(tensor).tolist()[:5]}"
    return "" if looked_at else "no tensor of the training is in it"
