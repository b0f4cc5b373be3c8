"""Reports of hangs as files in the daemon's state folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from ckptd.daemon.watch.evidence import HangReport
from ckptd.format.digests import hex_digest
from ckptd.limits import HANG_REPORTS_KEPT


def write_report(folder: Path, report: HangReport) -> Path:
    """Write it for this user alone, and let the oldest go beyond :data:`HANG_REPORTS_KEPT`. Blocking. Raises
    :class:`OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(report.unix_seconds))
    name = f"{moment}-{hex_digest(f'{report.run} {report.launch} {report.unix_seconds}'.encode())[:8]}"
    path = folder / f"{name}.json"
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=2))
    os.replace(fresh, path)
    for old in sorted(folder.glob("*.json"))[:-HANG_REPORTS_KEPT]:
        old.unlink(missing_ok=True)
    return path
