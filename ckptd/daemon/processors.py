"""How many processors this process may use: what the scheduler, and every cgroup above it, leave to it."""

from __future__ import annotations

import os
from pathlib import Path

from ckptd.daemon.cgroups import own_folders, text_of


def processor_count() -> float:
    """The least of the processors that it may run on and of each cgroup's quota, in processors; above zero, and not
    always whole."""
    quotas = [quota for folder, version in own_folders("cpu") if (quota := _quota(folder, version)) is not None]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def _quota(folder: Path, version: int) -> float | None:
    """Processor time for each second; ``None``: no limit."""
    if version == 2:
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
    else:
        quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # "max", "-1": none
        return None
    return int(quota) / int(period) if int(quota) and int(period) else None
