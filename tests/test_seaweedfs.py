"""The suite's S3 server is what the tests take it for: authenticated, private, atomic, and outlives its own death."""

from __future__ import annotations

from contextlib import closing

import boto3
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from devtools.seaweedfs import SeaweedFS

ONCE = Config(retries={"total_max_attempts": 1})


def _code(error: pytest.ExceptionInfo[ClientError]) -> int:
    status: int = error.value.response["ResponseMetadata"]["HTTPStatusCode"]
    return status


def test_server_is_real(own_s3_server: SeaweedFS) -> None:
    server = own_s3_server
    listening = [c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    assert server.secret_access_key not in repr(server)

    session = boto3.Session(server.access_key_id, server.secret_access_key, region_name=server.region)
    with closing(session.client("s3", endpoint_url=server.endpoint_url, config=ONCE)) as client:
        client.put_object(Bucket=server.bucket, Key="commit", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError) as taken:
            client.put_object(Bucket=server.bucket, Key="commit", Body=b"second", IfNoneMatch="*")
        assert _code(taken) == 412
        with pytest.raises(ClientError) as broken:
            client.put_object(Bucket=server.bucket, Key="other", Body=b"bytes", ChecksumCRC32C="AAAAAA==")
        assert _code(broken) == 400
        with pytest.raises(ClientError) as absent:
            client.put_object(Bucket="another-bucket", Key="key", Body=b"bytes")
        assert _code(absent) == 404

        server.restart()
        assert client.get_object(Bucket=server.bucket, Key="commit")["Body"].read() == b"first"

    stranger = boto3.Session(server.access_key_id, "a-wrong-secret", region_name=server.region)
    with closing(stranger.client("s3", endpoint_url=server.endpoint_url, config=ONCE)) as client:
        with pytest.raises(ClientError) as refused:
            client.get_object(Bucket=server.bucket, Key="commit")
        assert _code(refused) == 403
