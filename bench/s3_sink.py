"""``python -m bench.s3_sink``: an S3 server that keeps nothing, so that what a client can do is measured, not a store.

It throws bodies away in the kernel, without copying them, and sends objects from a memory file, without copying them.
It answers what clients ask around uploads and ranged reads, looks at no signature, and verifies no checksum: it counts
the bytes, and the parts that came with a CRC32C. Every object has the same bytes, :func:`pattern` over and over.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import threading
from email.utils import formatdate

PATTERN_BYTES = 16 * 2**20
STATISTICS_PATH = "/statistics"
_HEADER_BYTES_MAX = 64 * 1024
_DISCARD = memoryview(bytearray(4 * 2**20))
"""Never written to: with ``MSG_TRUNC`` the kernel drops what has come, and only counts it."""
_ETAG = f'"{"0" * 32}"'

_UPLOAD_STARTED = b"<InitiateMultipartUploadResult><UploadId>none</UploadId></InitiateMultipartUploadResult>"
_UPLOAD_DONE = f"<CompleteMultipartUploadResult><ETag>{_ETAG}</ETag></CompleteMultipartUploadResult>".encode()
_LISTING = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


def pattern() -> bytes:
    """What objects consist of; always the same."""
    return random.Random(1).randbytes(PATTERN_BYTES)


class Sink:
    """Listens on a free port of 127.0.0.1; every object has ``object_bytes``."""

    def __init__(self, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._memory = os.memfd_create("sink")
        os.write(self._memory, pattern())
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._statistics = {"bytes": 0, "bodies": 0, "checksums": 0}

    def serve(self) -> None:
        """For good: each connection has a thread."""
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            rest = b""
            while (found := _request(connection, rest)) is not None:
                head, rest = found
                method, path, _ = head.split("\r\n", 1)[0].split(" ", 2)
                size = int(_header(head, "content-length") or 0)
                if _header(head, "expect"):
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                rest = _discard(connection, rest, size)
                self._answer(connection, method, path, head, size)

    def _answer(self, connection: socket.socket, method: str, path: str, head: str, size: int) -> None:
        query = path.partition("?")[2]
        if path == STATISTICS_PATH:
            with self._lock:
                _send(connection, "200 OK", json.dumps(self._statistics).encode())
        elif method == "PUT":
            checksum = _header(head, "x-amz-checksum-crc32c")
            with self._lock:
                self._statistics["bytes"] += size
                self._statistics["bodies"] += 1
                self._statistics["checksums"] += bool(checksum)
            _send(connection, "200 OK", b"", f"x-amz-checksum-crc32c: {checksum}\r\n" if checksum else "")
        elif method == "POST":
            _send(connection, "200 OK", _UPLOAD_STARTED if "uploads" in query.split("&") else _UPLOAD_DONE)
        elif method == "GET" and "list-type" in query:
            _send(connection, "200 OK", _LISTING)
        elif method in ("GET", "HEAD"):
            self._send_object(connection, head, only_head=method == "HEAD")
        else:
            _send(connection, "204 No Content", b"")

    def _send_object(self, connection: socket.socket, head: str, *, only_head: bool) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", _header(head, "range"))
        start = int(wanted[1]) if wanted else 0
        stop = int(wanted[2]) + 1 if wanted and wanted[2] else self._object_bytes
        lines = f"Content-Range: bytes {start}-{stop - 1}/{self._object_bytes}\r\n" if wanted else ""
        _send_head(connection, "206 Partial Content" if wanted else "200 OK", stop - start, lines)
        while start < stop and not only_head:
            at = start % PATTERN_BYTES
            start += os.sendfile(connection.fileno(), self._memory, at, min(stop - start, PATTERN_BYTES - at))


def _request(connection: socket.socket, rest: bytes) -> tuple[str, bytes] | None:
    """The head of the next request and what came behind it; ``None`` where the client has gone."""
    while b"\r\n\r\n" not in rest:
        try:
            more = connection.recv(_HEADER_BYTES_MAX)
        except ConnectionError:
            return None
        if not more or len(rest) > _HEADER_BYTES_MAX:
            return None
        rest += more
    head, _, rest = rest.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _header(head: str, name: str) -> str:
    found = re.search(rf"(?im)^{name}:\s*(.*?)\s*$", head)
    return found[1] if found else ""


def _discard(connection: socket.socket, rest: bytes, size: int) -> bytes:
    """Let a body go by; returns what came behind it."""
    left = size - len(rest)
    while left > 0:
        count = connection.recv_into(_DISCARD, min(left, len(_DISCARD)), socket.MSG_TRUNC)
        if not count:
            raise ConnectionError("the client went in the middle of a body")
        left -= count
    return rest[size:]


def _send(connection: socket.socket, status: str, body: bytes, lines: str = "") -> None:
    _send_head(connection, status, len(body), lines)
    connection.sendall(body)


def _send_head(connection: socket.socket, status: str, size: int, lines: str) -> None:
    now = formatdate(usegmt=True)
    connection.sendall(
        f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nETag: {_ETAG}\r\nDate: {now}\r\nLast-Modified: {now}\r\n"
        f"{lines}\r\n".encode()
    )


if __name__ == "__main__":
    sink = Sink(int(sys.argv[1]))
    print(sink.port, flush=True)
    sink.serve()
