"""The daemon has found its backends before the first trainer asks for one."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = "import sys; from ckptd import storage; assert 'ckptd_backends' not in sys.modules; storage.preload({!r}); "


def told(scheme: str) -> str:
    program = (
        WITHOUT.format(scheme) + "print(*sorted(name for name in sys.modules if name.startswith('ckptd_backends')))"
    )
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_the_backend_of_a_scheme_is_imported_ahead() -> None:
    assert "ckptd_backends.local " in told("file")
    assert "ckptd_backends.wrappers.standard" in told("file")


def test_a_scheme_that_nobody_serves_is_no_error() -> None:
    assert "ckptd_backends.local " not in told("nothing")
