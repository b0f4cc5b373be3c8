"""The two ends of a request: memory that is sent, and memory that is filled, without copies."""

from __future__ import annotations

import base64
import io
from typing import Any

from crc32c import crc32c

from ckptd.errors import Unavailable
from ckptd.limits import KIB
from ckptd_backends.s3_connections import Breaker

FILL_BYTES = 256 * KIB
"""How much must arrive for a download to count as moving."""


class Body(io.RawIOBase):
    """A view as a file that can be rewound; what boto3 takes instead of a memoryview."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def __len__(self) -> int:
        return len(self._view)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, len(self._view))[whence] + offset
        return self._at

    def read(self, size: int = -1) -> Any:
        """A view of all that is left, however little the HTTP client asks for: the socket takes it in one go."""
        rest = self._view[self._at :]
        self._at = len(self._view)
        return rest if rest else b""

    def checksum(self) -> bytes:
        """Of all the bytes."""
        return checksum_of(self._view)

    def release(self) -> None:
        """Let go of the memory, whoever still holds this object: errors of the HTTP client do."""
        self._view = memoryview(b"")


class Download:
    """Fills memory from a response; can be stopped from another thread while it waits for bytes."""

    def __init__(self, out: memoryview = memoryview(b"")) -> None:  # noqa: B008  # immutable
        self.out = out
        self.breaker = Breaker()
        """To be around the request."""
        self.moves = 0
        """Counts up while bytes arrive; 0 until the request is on its way."""
        self._done_bytes = 0
        self._stopped = False

    def begin(self) -> None:
        """The request is about to be sent."""
        self.moves = 1

    def fill(self, body: Any) -> None:
        """Fill the memory from boto3's streaming body. Raises :class:`Unavailable` where it ends early."""
        stream = body._raw_stream
        # Below urllib3 lies http.client's response, which reads straight into our memory; the layers above copy.
        readinto = getattr(getattr(stream, "_fp", None), "readinto", None) or body.readinto
        while self._done_bytes < len(self.out) and not self._stopped:
            count = readinto(self.out[self._done_bytes : self._done_bytes + FILL_BYTES])
            if not count:
                break
            self._done_bytes += count
            self.moves += 1
        if self._done_bytes < len(self.out):
            reason = "stood still" if self._stopped else "ended early"
            raise Unavailable(f"the answer {reason} after {self._done_bytes} of {len(self.out)} bytes")
        stream.release_conn()  # all was read, so the connection can serve again

    def stop(self) -> None:
        """Make the request or :meth:`fill` raise soon. From any thread."""
        self._stopped = True
        self.breaker.break_off()


def checksum_of(view: bytes | memoryview) -> bytes:
    """CRC32C, big-endian, as S3 has it. Lets other threads run."""
    return crc32c(view, gil_release_mode=1).to_bytes(4, "big")


def in_base64(checksum: bytes) -> str:
    """A checksum as S3's headers carry it."""
    return base64.b64encode(checksum).decode()
