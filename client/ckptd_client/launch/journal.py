"""What the launcher tells: a line for people on standard error, and a JSON line for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Journal:
    """Each entry is one append, so that no kill cuts one in two."""

    def __init__(self, path: Path | None) -> None:
        """``path``: of the JSON lines; ``None``: none are written. Raises :class:`OSError`."""
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def tell(self, event: str, text: str, **fields: Any) -> None:
        """``event``: which kind, for programs; ``text``: in words."""
        print(f"ckptd run: {text}", file=sys.stderr, flush=True)
        if self._fd >= 0:
            entry = {"event": event, "unix_seconds": time.time(), "text": text, **fields}
            os.write(self._fd, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
