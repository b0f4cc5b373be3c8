"""A real HTTP server in front of a real S3 server, which goes wrong where a test tells it to.

Each fault is a function of an :class:`Exchange`; ``proxy.fault("UploadPart", refuse(503, "SlowDown"), times=3)`` lets
the next three requests of that kind meet it. What meets no fault is passed on as it is.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from devtools.seaweedfs import S3Endpoint

UPSTREAM_SECONDS = 30.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "proxy-connection", "expect"}
UNSIGNED = {"authorization", "x-amz-date", "x-amz-content-sha256", "host", "content-length", "user-agent"}

SLUGGISH_BYTES = 64 * 1024
"""Taken at once by a sluggish server."""

Fault = Callable[["Exchange"], None]


@dataclass(frozen=True)
class Answer:
    """A response that is complete."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Rule:
    """A fault, the requests it is for, and how many of them are still to meet it."""

    operation: str
    fault: Fault
    left: float
    when: Callable[[Exchange], bool]


@dataclass
class Exchange:
    """One request, and the ways to deal with it."""

    proxy: FaultProxy
    handler: http.server.BaseHTTPRequestHandler
    method: str
    target: str
    operation: str
    headers: dict[str, str]
    moment: float = field(default_factory=time.time)
    _body: bytes | None = None

    @property
    def body(self) -> bytes:
        """The request's body, read when it is first asked for."""
        if self._body is None:
            self._body = self.handler.rfile.read(int(self.headers.get("content-length", 0)))
        return self._body

    def pass_on(self) -> Answer:
        """The store's answer to the request as it is."""
        headers = {name: value for name, value in self.headers.items() if name not in HOP_BY_HOP}
        return self._ask(self.target, headers, self.body)

    def pass_on_signed_anew(
        self, *, without: tuple[str, ...] = (), body: bytes | None = None, more: str = ""
    ) -> Answer:
        """The store's answer to the request without some headers, with another body, or with ``more`` in the query,
        signed by the proxy: whatever the client's credentials were."""
        kept = {
            name: value
            for name, value in self.headers.items()
            if name not in HOP_BY_HOP | UNSIGNED and name not in without
        }
        server, data = self.proxy.server, self.body if body is None else body
        target = f"{self.target}{'&' if '?' in self.target else '?'}{more}" if more else self.target
        request = AWSRequest(self.method, server.endpoint_url + target, headers=kept, data=data)
        S3SigV4Auth(Credentials(server.access_key_id, server.secret_access_key), "s3", server.region).add_auth(request)
        headers = dict(request.headers.items())
        return self._ask(target, headers | {"host": urlsplit(server.endpoint_url).netloc}, data)

    def _ask(self, target: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=UPSTREAM_SECONDS)
        try:
            sent = headers | {"content-length": str(len(body))} if body or self.method in ("PUT", "POST") else headers
            connection.request(self.method, target, body=body or None, headers=sent)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())
        finally:
            connection.close()

    def reply(self, answer: Answer, *, body: bytes | None = None) -> None:
        """Send an answer, or only the beginning of its body."""
        _ = self.body  # else the next request on this connection would begin with it
        self.handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name not in HOP_BY_HOP | {"content-length"}:
                self.handler.send_header(name, value)
        length = answer.headers.get("content-length", "0") if self.method == "HEAD" else str(len(answer.body))
        self.handler.send_header("content-length", length)
        self.handler.end_headers()
        if self.method != "HEAD":
            self.handler.wfile.write(answer.body if body is None else body)
        self.handler.wfile.flush()

    def hang_up(self) -> None:
        """Close the connection without another byte."""
        self.handler.close_connection = True
        with contextlib.suppress(OSError):
            self.handler.connection.shutdown(socket.SHUT_RDWR)


# The menu


def refuse(status: int, code: str, *, headers: dict[str, str] | None = None, **details: str) -> Fault:
    """Answer with an error in S3's XML."""

    def fault(exchange: Exchange) -> None:
        _ = exchange.body
        exchange.reply(
            Answer(status, {"content-type": "application/xml"} | (headers or {}), error_xml(code, **details))
        )

    return fault


def error_xml(code: str, **details: str) -> bytes:
    """S3's error document."""
    fields = {"Code": code, "Message": f"injected {code}"} | details
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><Error>{inside}</Error>'.encode()


def silent(exchange: Exchange) -> None:
    """Read the request and never answer."""
    _ = exchange.body
    exchange.proxy.closing.wait(UPSTREAM_SECONDS)
    exchange.hang_up()


def deaf(exchange: Exchange) -> None:
    """Never read the request's body, never answer."""
    exchange.proxy.closing.wait(UPSTREAM_SECONDS)
    exchange.hang_up()


def silent_after_headers(exchange: Exchange) -> None:
    """Begin to answer, and say no more."""
    exchange.reply(exchange.pass_on(), body=b"")
    exchange.proxy.closing.wait(UPSTREAM_SECONDS)
    exchange.hang_up()


def sluggish(bytes_per_second: float) -> Fault:
    """Take the body slowly. For a proxy with a small ``receive_bytes``, else the kernel takes it at once."""

    def fault(exchange: Exchange) -> None:
        taken, size = bytearray(), int(exchange.headers.get("content-length", 0))
        while len(taken) < size and not exchange.proxy.closing.wait(SLUGGISH_BYTES / bytes_per_second):
            taken += exchange.handler.rfile.read(min(SLUGGISH_BYTES, size - len(taken)))
        exchange._body = bytes(taken)
        exchange.reply(exchange.pass_on())

    return fault


def cut(exchange: Exchange) -> None:
    """Break the connection before the request took effect."""
    exchange.hang_up()


def lose_answer(exchange: Exchange) -> None:
    """Let the request take effect and break the connection before the answer."""
    exchange.pass_on()
    exchange.hang_up()


def deliver_late(release: threading.Event, delivered: threading.Event) -> Fault:
    """Break the connection, and let the request take effect only when it is released: long after it was sent again."""

    def fault(exchange: Exchange) -> None:
        _ = exchange.body
        exchange.hang_up()
        release.wait(UPSTREAM_SECONDS)
        exchange.pass_on()
        delivered.set()

    return fault


def deliver_twice(exchange: Exchange) -> None:
    """The request takes effect twice; the first answer is the one that is heard."""
    answer = exchange.pass_on()
    exchange.pass_on()
    exchange.reply(answer)


def page_of_a_gateway(status: int) -> Fault:
    """What something in between says that does not know S3."""

    def fault(exchange: Exchange) -> None:
        exchange.reply(Answer(status, {"content-type": "text/html"}, b"<html><body>hello</body></html>"))

    return fault


def empty_answer(exchange: Exchange) -> None:
    """Success, and nothing else; the request took no effect."""
    exchange.reply(Answer(200, {}, b""))


def pages_of(count: int) -> Fault:
    """List so few objects at once."""
    return lambda exchange: exchange.reply(exchange.pass_on_signed_anew(more=f"max-keys={count}"))


def without_length(exchange: Exchange) -> None:
    """Send 70 % of the body, do not say how long it is, and close: a client cannot know that there was more."""
    answer = exchange.pass_on()
    exchange.handler.send_response_only(answer.status)
    exchange.handler.send_header("connection", "close")
    exchange.handler.end_headers()
    exchange.handler.wfile.write(answer.body[: len(answer.body) * 7 // 10])
    exchange.hang_up()


def error_in_success(code: str) -> Fault:
    """Status 200, and an error document: what S3 does when completing an upload fails late."""

    def fault(exchange: Exchange) -> None:
        exchange.reply(Answer(200, {"content-type": "application/xml"}, error_xml(code)))

    return fault


def truncate(size: int) -> Fault:
    """Break the connection after ``size`` bytes of the body, as servers do with readers that are slow."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.pass_on()
        exchange.reply(answer, body=answer.body[:size])
        exchange.hang_up()

    return fault


def trickle(exchange: Exchange) -> None:
    """One byte of the body every tenth of a second: any time limit on a single read starts anew with each."""
    answer = exchange.pass_on()
    exchange.reply(answer, body=b"")
    with contextlib.suppress(OSError):
        for at in range(len(answer.body)):
            exchange.handler.wfile.write(answer.body[at : at + 1])
            exchange.handler.wfile.flush()
            if exchange.proxy.closing.wait(0.1):
                break
    exchange.hang_up()


def keep_framing(exchange: Exchange) -> None:
    """Store the body in the framing of a chunked upload, as old servers do that do not know it."""
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(exchange.body), exchange.body)
    exchange.reply(exchange.pass_on_signed_anew(without=("x-amz-checksum-crc32c",), body=framed))


def ignore_condition(exchange: Exchange) -> None:
    """Overwrite although the client said not to."""
    exchange.reply(exchange.pass_on_signed_anew(without=("if-none-match",)))


def ignore_checksum(exchange: Exchange) -> None:
    """Store without looking at the checksum."""
    exchange.reply(exchange.pass_on_signed_anew(without=("x-amz-checksum-crc32c",)))


def sign_anew(exchange: Exchange) -> None:
    """Accept whatever credentials and region the client used."""
    exchange.reply(exchange.pass_on_signed_anew())


def one_after_another(*faults: Fault) -> Fault:
    """The first request meets the first fault, and so on; the last stays."""
    turns = itertools.chain(faults, itertools.repeat(faults[-1]))
    return lambda exchange: next(turns)(exchange)


def in_turn(*faults: Fault) -> Fault:
    """Each request meets the next of them, round and round."""
    turns = itertools.cycle(faults)
    return lambda exchange: next(turns)(exchange)


# The server


class FaultProxy:
    """A context manager. ``seen`` lists all requests, ``connections`` counts what was accepted."""

    def __init__(self, server: S3Endpoint, *, tls: ssl.SSLContext | None = None, receive_bytes: int = 0) -> None:
        """``tls``: speak it, with this certificate. ``receive_bytes``: what the kernel may take ahead of us."""
        self.server = server
        self.scheme = "https" if tls else "http"
        self.upstream = urlsplit(server.endpoint_url).netloc
        self.seen: list[Exchange] = []
        self.connections = 0
        self.hang_up_at_once = False
        """Close what connects, before a byte is read."""
        self.closing = threading.Event()
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._http = _Server(("127.0.0.1", 0), _handler(self))
        if receive_bytes:
            self._http.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if tls:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="fault-proxy")

    @property
    def endpoint_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self._http.server_address[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that lead through the proxy, with limits short enough for tests."""
        return {
            **self.server.options,
            "endpoint_url": self.endpoint_url,
            "connect_seconds": 2,
            "no_progress_seconds": 1,
            "part_bytes": 5 << 20,
        }

    def fault(
        self,
        operation: str,
        fault: Fault,
        *,
        times: float = 1,
        when: Callable[[Exchange], bool] = lambda exchange: True,
    ) -> None:
        """Let the next ``times`` requests of an operation meet the fault; ``*`` is every operation."""
        with self._lock:
            self._rules.append(Rule(operation, fault, times, when))

    def forget(self) -> None:
        """No more faults, and nothing seen."""
        with self._lock:
            self._rules.clear()
            self.seen.clear()

    def unmet(self) -> list[str]:
        """The operations of faults that fewer requests have met than were to."""
        with self._lock:
            return [rule.operation for rule in self._rules if rule.left > 0]

    def count(self, operation: str) -> int:
        """How many requests of this kind there were."""
        return sum(exchange.operation == operation for exchange in self.seen)

    def serve(self, exchange: Exchange) -> None:
        """Called by the server's threads."""
        with self._lock:
            self.seen.append(exchange)
            rule = next((rule for rule in self._rules if self._meets(exchange, rule)), None)
            if rule:
                rule.left -= 1
        if rule:
            rule.fault(exchange)
        else:
            exchange.reply(exchange.pass_on())

    @staticmethod
    def _meets(exchange: Exchange, rule: Rule) -> bool:
        return rule.left > 0 and rule.operation in ("*", exchange.operation) and rule.when(exchange)

    @contextlib.contextmanager
    def connection(self, connected: socket.socket) -> Iterator[None]:
        """Around the life of one connection."""
        with self._lock:
            self.connections += 1
            self._sockets.add(connected)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(connected)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._http.shutdown()
        with self._lock:
            for connected in self._sockets:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        self._http.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what many tests are about."""


def operation_of(method: str, target: str) -> str:
    """S3's name for a request in path style."""
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    if "uploadId" in query:
        if "partNumber" in query:
            return "UploadPart"
        return {"POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}.get(method, "ListParts")
    if "uploads" in query:
        return {"POST": "CreateMultipartUpload"}.get(method, "ListMultipartUploads")
    if "delete" in query:
        return "DeleteObjects"
    if "list-type" in query:
        return "ListObjectsV2"
    kind = "Object" if "/" in parts.path.strip("/") else "Bucket"
    return {"PUT": "Put", "GET": "Get", "HEAD": "Head", "DELETE": "Delete"}.get(method, method) + kind


def _handler(proxy: FaultProxy) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with proxy.connection(self.connection), contextlib.suppress(OSError):
                if not proxy.hang_up_at_once:
                    super().handle()

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            target = self.path.removeprefix(f"{parts.scheme}://{parts.netloc}")  # absolute where we are a proxy by name
            headers = {name.lower(): value for name, value in self.headers.items()}
            proxy.serve(Exchange(proxy, self, self.command, target, operation_of(self.command, target), headers))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # http.server's names

        def log_message(self, format: str, *args: Any) -> None:
            """The test looks at ``seen``."""

    return Handler
