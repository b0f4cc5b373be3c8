"""Where an S3 root lies, and the storage options for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from ckptd.errors import ConfigError
from ckptd.limits import GIB, MIB
from ckptd_backends.options import Secret

PART_BYTES_MIN = 5 * MIB
"""S3 refuses smaller parts, except the last."""
PART_BYTES_MAX = 5 * GIB
PARTS_TARGET_MAX = 9_000
"""S3 takes 10,000; the margin costs nothing."""
OBJECT_BYTES_MAX = 5 * 1024 * GIB


class S3Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``storage_options`` of ``s3://``. What is left out comes from the environment and the files that every AWS tool
    reads."""

    endpoint_url: str | None = None
    """For MinIO, SeaweedFS and others; AWS itself needs none."""
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: Secret | None = None
    session_token: Secret | None = None
    profile: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """``auto``: the bucket in the path for every endpoint that is not AWS's, in the host name for AWS."""
    sign_payload: bool = False
    """Hash the body for the signature too. Over plain http that protects against tampering; it costs most of the
    CPU time of an upload. The CRC32C of each part is checked either way."""
    checksum: Literal["crc32c", "none"] = "crc32c"
    """``none`` for old stores that refuse checksum headers."""
    create_bucket: bool = False
    """Make the bucket where it is missing; else a missing bucket is an error."""
    part_bytes: int = 16 * MIB
    """Size of a part and of a ranged read; larger objects get larger parts, so that 10,000 suffice."""
    inflight_max: int = 8
    """Requests at once, each in a thread with a connection of its own."""
    server_side_encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    sse_kms_key_id: str | None = None
    verify: bool = True
    """Check the server's TLS certificate."""
    ca_bundle: str | None = None
    """A file of certificate authorities instead of the built-in ones."""
    connect_seconds: float = 10.0
    no_progress_seconds: float = 60.0
    """How long a request may stand still before it fails and is tried again."""
    part_attempts_max: int = 6
    """How often one part or one range is tried before the whole put or read fails."""
    part_deadline_seconds: float = 180.0

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key belong together")
        if self.endpoint_url is not None and not self.endpoint_url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint_url={self.endpoint_url!r} must begin with http:// or https://")
        if not PART_BYTES_MIN <= self.part_bytes <= PART_BYTES_MAX or self.part_bytes % MIB:
            raise ValueError("part_bytes must be whole MiB between 5 MiB and 5 GiB")
        if not 1 <= self.inflight_max <= 256 or not 1 <= self.part_attempts_max <= 100:
            raise ValueError("inflight_max must be between 1 and 256, part_attempts_max between 1 and 100")
        if min(self.connect_seconds, self.no_progress_seconds, self.part_deadline_seconds) <= 0:
            raise ValueError("limits in seconds must be above zero")


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and what all names below the root begin with (empty, or ending in ``/``)."""

    bucket: str
    prefix: str

    def name(self, key: str) -> str:
        """The name in the bucket of the object ``key``."""
        return self.prefix + key

    def url(self, name: str) -> str:
        """A name in the bucket, for people."""
        return f"s3://{self.bucket}/{name}"


def place_of(url: str) -> Place:
    """Raises :class:`ConfigError` where the URL names no bucket, or a query or fragment is in it."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if not parts.netloc or parts.query or parts.fragment or "//" in prefix:
        raise ConfigError(f"not a root on S3: {url}", hint="it looks like s3://bucket/runs/name")
    return Place(parts.netloc, f"{prefix}/" if prefix else "")


def part_bytes_for(size: int, part_bytes: int) -> int:
    """The size of a part for an object of ``size`` bytes: ``part_bytes``, or as many whole MiB as it takes."""
    smallest = -(-size // PARTS_TARGET_MAX)
    return max(part_bytes, -(-smallest // MIB) * MIB)
