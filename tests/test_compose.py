"""What ``docker-compose.yml`` and ``deploy/`` promise: valid against the official schema, pinned, private, consistent,
and in step with the commands that there are."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptd.wire.channel import SOCKET_VARIABLE

ROOT = Path(__file__).parent.parent
MINIO_IMAGE = "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"


@cache
def _compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


@cache
def _pod() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "kubernetes.yaml").read_text())
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def _unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser()  # per cent signs are systemd's
    parser.read(ROOT / "deploy" / "ckptd.service")
    return parser["Service"]


def test_compose_file_fits_the_official_schema() -> None:
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_minio_is_real_pinned_and_asked_in_a_way_it_can_answer() -> None:
    minio = _compose()["services"]["minio"]
    assert minio["image"] == MINIO_IMAGE
    assert minio["healthcheck"]["test"] == ["CMD", "mc", "ready", "local"]


def test_images_are_pinned_and_ports_private() -> None:
    for name, service in _compose()["services"].items():
        assert "build" in service or re.search(r":[\w.-]*\d[\w.-]*$", service["image"]), f"{name} is not pinned"
        for port in service.get("ports", ()):
            assert re.fullmatch(r"127\.0\.0\.1:19\d{3}:\d+", port), f"{name} publishes {port}"


def test_servers_are_alternatives_behind_one_name() -> None:
    services = _compose()["services"]
    for name in ("minio", "seaweedfs"):
        assert services[name]["profiles"] == [name]
        assert services[name]["networks"]["default"]["aliases"] == ["s3"]
        assert services["ckptd"]["depends_on"][name] == {"condition": "service_healthy", "required": False}


def test_daemon_and_trainer_share_what_they_must() -> None:
    daemon, trainer = (_compose()["services"][name] for name in ("ckptd", "trainer"))
    assert daemon["user"] == trainer["user"]
    assert daemon["volumes"] == trainer["volumes"]
    assert trainer["depends_on"]["ckptd"]["condition"] == "service_healthy"
    assert f"ckptd-socket:{_socket_volume()}" in daemon["volumes"]
    for service, image in ((daemon, "daemon"), (trainer, "trainer")):
        assert service["build"]["dockerfile"] == f"deploy/Dockerfile.{image}"
        assert f"USER {service['user']}" in _dockerfile(image)


def test_daemon_image_has_no_torch() -> None:
    assert not any("torch" in line for line in _dockerfile("daemon") if not line.startswith("#"))


def test_images_are_given_what_they_copy() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"ckptd", "client", "backends", "pyproject.toml", "constraints.txt", "README.md"} <= let_through
    assert [name for name in let_through if not (ROOT / name).exists()] == []


def test_pod_keeps_the_daemon_longer_than_the_trainer() -> None:
    pod = _pod()
    (daemon,) = pod["initContainers"]
    (trainer,) = pod["containers"]
    assert daemon["restartPolicy"] == "Always"
    assert pod["shareProcessNamespace"] is True
    drain = daemon["lifecycle"]["preStop"]["exec"]["command"]
    assert drain[:2] == ["ckptd", "drain"]
    assert int(drain[drain.index("--deadline") + 1]) < pod["terminationGracePeriodSeconds"]
    for container in (daemon, trainer):
        assert {"name": "ckptd-socket", "mountPath": _socket_volume()} in container["volumeMounts"]


def test_policy_grants_no_more_than_is_used() -> None:
    policy = json.loads((ROOT / "deploy" / "s3-policy.json").read_text())
    granted = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert granted == {
        "s3:AbortMultipartUpload",
        "s3:DeleteObject",
        "s3:GetObject",
        "s3:ListBucket",
        "s3:ListBucketMultipartUploads",
        "s3:PutObject",
    }
    for statement in policy["Statement"]:
        assert all(resource.startswith("arn:aws:s3:::BUCKET") for resource in statement["Resource"])


def _dockerfile(image: str) -> list[str]:
    return (ROOT / "deploy" / f"Dockerfile.{image}").read_text().splitlines()


def _socket_volume() -> str:
    """Where both images expect the shared volume: above the folder that the daemon makes for its socket alone."""
    sockets = {line for image in ("daemon", "trainer") for line in _dockerfile(image) if SOCKET_VARIABLE in line}
    (line,) = sockets
    return str(Path(line.split("=", 1)[1]).parent.parent)


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of ``ckptd`` in the deployment files."""
    compose = _compose()["services"]["ckptd"]
    yield "compose health", compose["healthcheck"]["test"][2:]
    (daemon,) = _pod()["initContainers"]
    yield "pod", daemon["args"]
    yield "pod start-up", daemon["startupProbe"]["exec"]["command"][1:]
    yield "pod liveness", daemon["livenessProbe"]["exec"]["command"][1:]
    yield "pod drain", daemon["lifecycle"]["preStop"]["exec"]["command"][1:]
    yield "unit", _unit()["ExecStart"].split()[1:]


@pytest.mark.parametrize("argv", [pytest.param(argv, id=where) for where, argv in _commands()])
def test_commands_in_deployments_exist(argv: list[str]) -> None:
    help_text = _help(argv[0])
    assert [word for word in argv if word.startswith("--") and word not in help_text] == []


@cache
def _help(command: str) -> str:
    done = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "ckptd", command, "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
