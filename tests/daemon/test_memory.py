"""How much memory is left, by the rules of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.daemon import cgroups, memory
from ckptd.limits import GIB, MIB

OWN = {"v2": "0::/slice/job\n", "v1": "5:cpu:/elsewhere\n4:memory,hugetlb:/slice/job\n0::/\n"}


def cgroup(root: Path, version: str, where: str, *, limit: int | None, used: int, cache: int) -> None:
    folder = root / where if version == "v2" else root / "memory" / where
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    none = "max" if version == "v2" else "9223372036854771712"
    (folder / names[0]).write_text(f"{none if limit is None else limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    prefix = "" if version == "v2" else "total_"
    (folder / "memory.stat").write_text(f"{prefix}active_file {cache}\n{prefix}inactive_file 0\nshmem 999999999\n")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_cgroup_decides(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text(OWN[version])
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", own)
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    unlimited = memory.headroom_bytes()
    assert unlimited > 0
    cgroup(tmp_path, version, "slice/job", limit=None, used=5 * GIB, cache=0)
    assert memory.headroom_bytes() == pytest.approx(unlimited, rel=0.2)
    cgroup(tmp_path, version, "slice", limit=100 * MIB, used=60 * MIB, cache=20 * MIB)
    assert memory.headroom_bytes() == (100 - 5 - 60 + 20) * MIB
    cgroup(tmp_path, version, "slice/job", limit=40 * MIB, used=39 * MIB, cache=0)
    assert memory.headroom_bytes() == 0


def test_the_cgroups_of_this_machine_can_be_read() -> None:
    assert memory.headroom_bytes() > 0
