"""``python -m tests.hostile.fuzz NAME [-max_total_time=SECONDS …]``: bytes for one decoder without end, guided by what
code they reach. Without a name, what names there are. What goes after it is for libFuzzer.

Whatever is no error of ours ends it, with the bytes in a file ``crash-…``: give that file in the place of options to
see it again.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

from ckptd.errors import CkptdError

with atheris.instrument_imports(include=["ckptd"]):
    from tests.hostile.decoders import decoders


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    if len(sys.argv) < 2 or sys.argv[1] not in decoders():
        raise SystemExit("which? " + ", ".join(decoders()))
    decoder = decoders()[sys.argv[1]]

    def once(data: bytes) -> None:
        with contextlib.suppress(CkptdError):
            decoder.decode(data)

    corpus = Path(tempfile.mkdtemp(prefix="ckptd-fuzz-"))
    for number, example in enumerate(decoder.examples):
        (corpus / str(number)).write_bytes(example)
    atheris.Setup([sys.argv[0], *sys.argv[2:], str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
