"""Whatever bytes come in: a value, or one of our own errors, and nothing else.

``make fuzz`` looks longer, guided by what code it reaches.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError
from tests.hostile.decoders import decoders
from tests.hostile.mutations import changed

CHANGED = 150
"""Of each decoder's examples."""
LOOSE = {"arena", "status page", "rows"}
"""Whose bytes are not all looked at."""


@pytest.mark.parametrize("name", decoders())
def test_good_bytes_are_taken(name: str) -> None:
    decoder = decoders()[name]
    taken = 0
    for example in decoder.examples:
        with contextlib.suppress(CkptdError):  # some rank of another world, some record of another kind
            decoder.decode(example)
            taken += 1
    assert taken


@pytest.mark.parametrize("name", decoders())
def test_changed_bytes_are_taken_or_refused(name: str) -> None:
    decoder, chance = decoders()[name], random.Random(name)
    refused = 0
    for _ in range(CHANGED):
        data = changed(chance.choice(decoder.examples), chance)
        try:
            decoder.decode(data)
        except CkptdError:
            refused += 1
    assert refused or name in LOOSE


@pytest.mark.parametrize("name", decoders())
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=600))
def test_any_bytes_are_taken_or_refused(name: str, data: bytes) -> None:
    with contextlib.suppress(CkptdError):
        decoders()[name].decode(data)


TAKEN = {("tree", "a long string"), ("tree", "many empty arrays"), ("manifest", "a world of many")}
"""There is nothing wrong with these alone."""


def test_what_is_far_too_much_is_refused_with_little_memory_and_time() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.heavy"], capture_output=True, text=True, timeout=170, check=False
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[-1:] == [["end"]], done.stdout[-2000:] + done.stderr[-2000:]
    assert {(decoder, name) for verdict, decoder, name, *_ in lines[:-1] if verdict == "taken"} <= TAKEN
