"""``python -m ckptd.checkpoint.prover RECEIPTS now|early``: a proof in a process of its own.

A proof of a large world computes for seconds to minutes, all the while with the interpreter's lock. Here it is its own
lock. Started by exec from :mod:`ckptd.checkpoint.proofs`, with which it speaks over standard input and output in frames
of plain bytes: a letter, the length of what follows in eight bytes, and that. It ends when it has answered the last
question, when its input ends, and when nobody is left to read its output.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from ckptd.errors import to_fields
from ckptd.exits import Exit
from ckptd.format.proof import Proof
from ckptd.format.records import encode

OOM_SCORE_ADJUST = 500
HEAD = struct.Struct(">cQ")
"""Letter and length."""
RANK = struct.Struct(">Q")
KEY_BYTES = struct.Struct(">H")

ADD = b"a"
"""A receipt. Not answered, unless it is refused."""
ASK = b"q"
"""Answered by itself, with the ranks in question."""
LOOK = b"l"
"""Rank and receipt. Not answered, unless it is refused."""
COMMIT = b"c"
"""Answered by the objects, whether it is pinned, and last the manifest."""

OBJECT = b"o"
"""Length of the key, key, bytes."""
PINNED = b"p"
MANIFEST = b"m"
REFUSED = b"e"
"""An error as JSON; the process then ends."""


def main() -> None:
    """Serve one proof."""
    # What ends the process that started this one may be sent to both: that one then says when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        # Where memory ends, this goes first: before a trainer, and a daemon that holds the only copy of a snapshot.
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUST))
    threading.Thread(target=_end_with_the_reader, daemon=True).start()
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        _serve(Proof(int(sys.argv[1]), early=sys.argv[2] == "early"), asked, answers)
    except Exception as error:
        _send(answers, REFUSED, msgspec.json.encode(to_fields(error)))


def _serve(proof: Proof, asked: BinaryIO, answers: BinaryIO) -> None:
    while head := asked.read(HEAD.size):
        letter, size = HEAD.unpack(head)
        data = asked.read(size)
        if len(data) < size:
            return
        if letter == ADD:
            proof.add(data)
        elif letter == LOOK:
            (rank,) = RANK.unpack_from(data)
            proof.look(rank, data[RANK.size :])
        elif letter == ASK:
            _send(answers, ASK, msgspec.json.encode(proof.questions()))
        else:
            commit = proof.commit()
            for key, content in commit.objects.items():
                name = key.encode()
                _send(answers, OBJECT, KEY_BYTES.pack(len(name)), name, content)
            if commit.pinned:
                _send(answers, PINNED)
            _send(answers, MANIFEST, encode(commit.manifest))
            return


def _send(answers: BinaryIO, letter: bytes, *parts: bytes) -> None:
    answers.write(HEAD.pack(letter, sum(map(len, parts))))
    for part in parts:
        answers.write(part)
    answers.flush()


def _end_with_the_reader() -> None:
    """In the middle of a long computation too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # nothing but that the other end is closed
    poll.poll()
    os._exit(Exit.ERROR)


if __name__ == "__main__":
    main()
