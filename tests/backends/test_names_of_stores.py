"""A root that can be none is refused with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from botocore import exceptions as boto

from ckptd.checkpoint.run import Run
from ckptd.errors import AccessDenied, ConfigError, Unavailable
from ckptd.storage import normal_url, open_backend
from ckptd_backends import s3_errors


def test_two_slashes_name_a_host() -> None:
    with pytest.raises(ConfigError, match=r"names a host, 'tmp'.*file:///tmp/x"):
        normal_url("file://tmp/x")
    assert normal_url("file:///tmp/x") == normal_url("/tmp/x") == "file:///tmp/x"
    assert normal_url("file://~/x") == f"file://{Path.home()}/x"


@pytest.mark.parametrize(("url", "meant"), [("s4://b/x", "s3"), ("fiel:///x", "file"), ("memroy://x", "memory")])
def test_a_scheme_that_nobody_knows(url: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="no store has the scheme") as refused:
        open_backend(url)
    assert "known are file, s3, memory" in refused.value.hint
    assert meant in refused.value.hint.partition("; or is ")[2].partition(" meant?")[0]


@pytest.mark.parametrize(
    ("root", "kind", "said"),
    [
        ("/proc/ckptd/x", AccessDenied, "the folder /proc/ckptd cannot be made: /proc takes none"),
        ("/proc/self/environ", ConfigError, "environ is not a folder, so no run can lie at"),
    ],
)
async def test_a_root_that_cannot_be_made(root: str, kind: type[Exception], said: str) -> None:
    backend = open_backend(root)
    with pytest.raises(kind, match=said):
        await Run.open(backend, create=True)
    await backend.aclose()


def test_credentials_are_asked_for_by_the_names_that_people_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def hint() -> str:
        with pytest.raises(AccessDenied) as refused, s3_errors.mapped("key", "s3://bucket/key"):
            raise boto.NoCredentialsError
        return refused.value.hint

    for words in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "storage_options"):
        assert words in hint()
    assert "drain" not in hint()
    monkeypatch.setattr("sys.argv", ["ckptd", "serve"])
    assert "ckptd drain" in hint()


def test_an_endpoint_without_a_server() -> None:
    with pytest.raises(Unavailable, match="is endpoint_url right"), s3_errors.mapped("key", "s3://bucket/key"):
        raise boto.EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
