"""An environment of its own for each peer that is not of this one, made when it is first wanted.

It sees this environment's packages behind its own, torch above all, so that a peer brings what it needs in the releases
that it wants, all run on the same torch, and no second torch is ever installed: the installer is told so.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

PINS = Path(__file__).parent / "peers"
"""One list of pinned releases for each environment."""
ENVIRONMENTS = Path(__file__).parent.parent / "build" / "peers"
INSTALL_SECONDS = 900.0
_DONE = "installed.txt"
"""In an environment: the pins that it was made from."""


class NotInstalled(Exception):
    """A peer that cannot be had here; says what the installer said at last."""


def interpreter(environment: str | None, folder: Path = ENVIRONMENTS) -> Path:
    """The interpreter to run a peer in; ``None``: this one. Makes the environment, or makes it anew where its pins have
    changed. Raises :class:`NotInstalled`."""
    if environment is None:
        return Path(sys.executable)
    pins, place = PINS / f"{environment}.txt", folder / environment
    with _locked(folder):
        if not (place / _DONE).exists() or (place / _DONE).read_text() != pins.read_text():
            shutil.rmtree(place, ignore_errors=True)
            _make(place, pins)
            shutil.copyfile(pins, place / _DONE)
    return place / "bin" / "python"


def _make(place: Path, pins: Path) -> None:
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    (own / "behind.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    torch = place / "torch.txt"
    torch.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    argv: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--constraint",
        torch,
        "--requirement",
        pins,
    ]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{pins.stem}: not installed after {INSTALL_SECONDS:g} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(f"{pins.stem}: {(said or ['the installer failed'])[-1][:200]}")


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Two runs at once do not make the same environment."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
