"""The boto3 client, and requests through it in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, Literal, ParamSpec, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.utils import get_environ_proxies

from ckptd.errors import CredentialsExpired
from ckptd_backends.options import Secret
from ckptd_backends.pool import Pool
from ckptd_backends.retry import RetryPolicy
from ckptd_backends.s3_connections import Breaker, make_breakable
from ckptd_backends.s3_errors import mapped, not_s3
from ckptd_backends.s3_options import Place, S3Options

P = ParamSpec("P")
T = TypeVar("T")

SPARE_CONNECTIONS = 4
"""More than there are threads, so that none waits for one between signing and sending."""


@cache
def _models() -> Any:
    """What botocore knows of S3, 12 MiB: once for all clients of a process, and not once for each."""
    return create_loader()


class Clients:
    """The client of one backend: made at first use, and anew where its credentials ran out. Blocking, thread-safe."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._current: Any = None
        self._retired: list[Any] = []

    def get(self) -> Any:
        """The client to use now."""
        with self._lock:
            if self._current is None:
                self._current = self._make()
            return self._current

    def renew(self, stale: Any) -> None:
        """Have the credentials resolved again, unless that was done since ``stale`` was got."""
        with self._lock:
            if self._current is stale:
                self._retired.append(stale)  # other threads may be in the middle of a request
                self._current = None

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            for client in [*self._retired, *([self._current] if self._current is not None else [])]:
                client.close()
            self._retired, self._current = [], None

    def _make(self) -> Any:
        options = self._options
        core = botocore.session.get_session()
        session = boto3.Session(
            botocore_session=core,
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=_revealed(options.secret_access_key),
            aws_session_token=_revealed(options.session_token),
            region_name=options.region,
            profile_name=options.profile,
        )
        core.register_component("data_loader", _models())
        style = options.addressing_style
        client = self._client(session, "path" if style == "auto" and options.endpoint_url else style)
        if style == "auto" and not options.endpoint_url and not _is_aws(client.meta.endpoint_url):
            client.close()  # the endpoint came from the environment or a file
            client = self._client(session, "path")
        return client

    def _client(self, session: Any, addressing_style: Literal["auto", "path", "virtual"]) -> Any:
        options = self._options
        config = Config(
            signature_version="s3v4",
            connect_timeout=options.connect_seconds,
            read_timeout=options.no_progress_seconds,
            tcp_keepalive=True,
            max_pool_connections=options.inflight_max + SPARE_CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 1},  # who retries must see lost answers: see Retrying
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": addressing_style, "payload_signing_enabled": options.sign_payload},
        )
        client = session.client(
            "s3",
            region_name=session.region_name or "us-east-1",
            endpoint_url=options.endpoint_url,
            verify=options.ca_bundle or (None if options.verify else False),
            config=config,
        )
        make_breakable(client, options.no_progress_seconds)
        return client


class Requests:
    """Requests to one bucket, in threads, with the errors of ckptd."""

    def __init__(self, place: Place, options: S3Options, pool: Pool) -> None:
        self.place = place
        self.options = options
        self.pool = pool
        self.part_policy = RetryPolicy(
            attempts_max=options.part_attempts_max, deadline_seconds=options.part_deadline_seconds
        )
        self._clients = Clients(options)

    async def send(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        """One request of the client's method ``operation``; ``key`` only names it in errors."""
        return await self.run(Breaker(), self.send_here, operation, key, **parameters)

    async def run(self, breaker: Breaker, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call`` in a thread. Where the caller is cancelled, the request that runs then is broken off."""
        return await self.pool.run_stoppable(breaker.break_off, breaker.run, partial(call, *args, **kwargs))

    def send_here(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        """The same in this thread."""
        where = self.place.url(str(parameters.get("Key") or parameters.get("Prefix") or self.place.name(key)))
        with mapped(key, where):
            client = self._clients.get()
        try:
            with mapped(key, where):
                answer: dict[str, Any] = getattr(client, operation)(Bucket=self.place.bucket, **parameters)
                return answer
        except CredentialsExpired:
            self._clients.renew(client)
            raise

    async def create_bucket(self) -> None:
        """Make the bucket, in the client's region."""
        region = (await self.pool.run(self._clients.get)).meta.region_name
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        await self.send("create_bucket", "", **place)

    def endpoint(self) -> str:
        """The URL that requests go to. Blocking."""
        return str(self._clients.get().meta.endpoint_url)

    def route(self) -> str:
        """How requests get there, by the proxy variables of the environment; without the proxy's credentials."""
        endpoint = self.endpoint()
        proxies: dict[str, str] = get_environ_proxies(endpoint)
        proxy = proxies.get(urlsplit(endpoint).scheme)
        if not proxy:
            return f"{endpoint}, directly"
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return f"{endpoint}, through the proxy {parts.scheme}://{parts.hostname}:{parts.port}"

    async def aclose(self) -> None:
        await self.pool.aclose()
        self._clients.close()


def encryption(options: S3Options) -> dict[str, str]:
    """The parameters of requests that create objects."""
    found: dict[str, str] = {}
    if options.server_side_encryption:
        found["ServerSideEncryption"] = options.server_side_encryption
    if options.sse_kms_key_id:
        found["SSEKMSKeyId"] = options.sse_kms_key_id
    return found


def required(answer: dict[str, Any], name: str, key: str) -> Any:
    """What every S3 store's answer has. Raises :class:`Unavailable` where it is missing: a gateway in between may say
    ``200`` to anything."""
    if name not in answer:
        raise not_s3(f"the answer has no {name}", key)
    return answer[name]


def answer_seconds(answer: dict[str, Any]) -> float:
    """When the store sent its answer, by its own clock; 0 where it does not say."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else 0.0


def _is_aws(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _revealed(secret: Secret | None) -> str | None:
    return secret.reveal() if secret else None
