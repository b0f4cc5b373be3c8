"""``--metrics``: a small web server in threads of its own, for Prometheus and for probes. It never answers for the
daemon: each question goes to the event loop, and one that the loop does not take up in time is the answer as well."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse

from ckptd.daemon.metrics import CONTENT_TYPE, exposition
from ckptd.errors import ConfigError, first_line

if TYPE_CHECKING:
    from ckptd.daemon.service import Service

LOOP_SECONDS = 5.0
"""The event loop does nothing that takes so long."""
CLIENT_SECONDS = 10.0
"""A client that sends nothing is let go."""
PLAIN = "text/plain; charset=utf-8"

T = TypeVar("T")
log = logging.getLogger(__name__)


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[::1]:port``. Raises :class:`ConfigError`."""
    try:
        found = urlsplit(f"//{text}")
        if found.hostname and found.port is not None and found.netloc == text:
            return found.hostname, found.port
    except ValueError:
        pass
    raise ConfigError(f"--metrics {text!r} is no host:port", hint="such as 127.0.0.1:9464")


class Web:
    """Answers ``/metrics``, ``/healthz`` and ``/readyz`` until :meth:`close`."""

    def __init__(self, service: Service, address: str) -> None:
        """``address``: ``host:port``. Raises :class:`ConfigError`; :class:`OSError` where nobody can listen there."""
        self._service = service
        self._loop = asyncio.get_running_loop()
        host, port = parse_address(address)
        self._server = make_server(host, port, self._answer, _Server, _Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, name="ckptd-web", daemon=True)
        self._thread.start()
        log.info("metrics at http://%s:%d/metrics", host, self._server.server_port)

    def close(self) -> None:
        """Stop listening. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        status, kind, body = self._found(environ.get("PATH_INFO", ""))
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def _found(self, path: str) -> tuple[str, str, bytes]:
        pages: dict[str, Callable[[], tuple[str, str, bytes]]] = {
            "/metrics": lambda: ("200 OK", CONTENT_TYPE, exposition(self._service)),
            "/healthz": lambda: ("200 OK", PLAIN, b"alive\n"),
            "/readyz": self._ready,
        }
        page = pages.get(path)
        if page is None:
            return "404 Not Found", PLAIN, b"/metrics, /healthz, /readyz\n"
        try:
            return self._on_loop(page)
        except concurrent.futures.TimeoutError:
            return "503 Service Unavailable", PLAIN, f"the event loop stood still for {LOOP_SECONDS:g} s\n".encode()
        except Exception as error:
            log.exception("%s", path)
            return "500 Internal Server Error", PLAIN, first_line(error).encode()

    def _on_loop(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LOOP_SECONDS)

    def _ready(self) -> tuple[str, str, bytes]:
        """Whether trainers may come: not while it drains, nor where a store has failed its self-test."""
        service = self._service
        reasons = ["draining"] if service.saves.draining else []
        for url, findings in service.stores.findings.items():
            reasons += [f"{url}: {finding.message}" for finding in findings if finding.level == "error"]
        if reasons:
            return "503 Service Unavailable", PLAIN, ("\n".join(reasons) + "\n").encode()
        return "200 OK", PLAIN, b"ready\n"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds."""
