"""Alerts as JSON to a URL: tried again for some time, never for ever, and never in anybody's way."""

from __future__ import annotations

import logging
import queue
import threading
import urllib.request
from urllib.parse import urlsplit

import msgspec
from tenacity import Retrying, stop_after_attempt

from ckptd.daemon.watch.alerts import Alert
from ckptd.errors import ConfigError, first_line
from ckptd.jitter import backoff_seconds

ATTEMPTS_MAX = 6
ANSWER_SECONDS = 10.0
CLOSE_SECONDS = 2.0
BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 1.0, 30.0
WAITING_MAX = 64
"""Alerts that wait for a receiver that does not answer; further ones are dropped, and the log has them."""

log = logging.getLogger(__name__)


class Webhook:
    """A sink; see :class:`ckptd.daemon.watch.alerts.Alerts`."""

    def __init__(self, url: str) -> None:
        """Raises :class:`ConfigError` for what is no web address."""
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError("--webhook takes an http or https URL")
        self._url = url  # may hold a token: never logged
        self._host = urlsplit(url).hostname
        self._waiting: queue.Queue[Alert | None] = queue.Queue(WAITING_MAX + 1)
        self._thread = threading.Thread(target=self._send_all, name="ckptd-webhook", daemon=True)
        self._thread.start()

    def __call__(self, alert: Alert) -> None:
        """Returns at once."""
        if self._waiting.qsize() >= WAITING_MAX:
            log.error("%d alerts wait for %s already: %s is not sent", WAITING_MAX, self._host, alert.kind)
        else:
            self._waiting.put_nowait(alert)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for what is still to be sent, but not for long."""
        self._waiting.put_nowait(None)
        self._thread.join(seconds)

    def _send_all(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                self._send(alert)
            except Exception as error:
                log.error("an alert, %s, did not reach %s: %s", alert.kind, self._host, first_line(error))

    def _send(self, alert: Alert) -> None:
        body = msgspec.json.encode({"source": "ckptd", **alert.plain()})
        for attempt in Retrying(
            stop=stop_after_attempt(ATTEMPTS_MAX),
            wait=lambda state: backoff_seconds(state.attempt_number, BACKOFF_SECONDS, BACKOFF_SECONDS_MAX),
            reraise=True,
        ):
            with attempt:
                request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
                with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):  # what is no 2xx raises
                    pass
