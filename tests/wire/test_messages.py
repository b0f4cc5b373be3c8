"""Messages: each comes back as it was sent, and whatever else arrives is a ProtocolError."""

from __future__ import annotations

import contextlib
import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import errors
from ckptd.errors import CkptdError, DaemonError, NotFound, ProtocolError, UsageError
from ckptd.format.keys import GENERATION_MAX, RANK_MAX, STEP_MAX
from ckptd.limits import INTEGER_MAX, MESSAGE_BYTES_MAX, SLOTS_MAX
from ckptd.wire import messages
from ckptd.wire.messages import (
    Failed,
    GetStatus,
    Hello,
    Incoming,
    Message,
    Outgoing,
    Refused,
    TierOfRun,
    as_error,
    decode_incoming,
    decode_outgoing,
    encode,
    refusal,
)

INCOMING: tuple[type[Message], ...] = get_args(Incoming)
OUTGOING: tuple[type[Message], ...] = get_args(Outgoing)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
LIMITS = {
    "step": STEP_MAX,
    "generation": GENERATION_MAX,
    "rank": RANK_MAX,
    "world": RANK_MAX + 1,
    "signal": 64,
    "slot": SLOTS_MAX - 1,
    "slots": SLOTS_MAX,
}


def values(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Values for a field of a message."""
    if isinstance(kind, msgspec.inspect.IntType):
        low = 1 if name in ("world", "slots") else 0
        return st.integers(low, LIMITS.get(name, INTEGER_MAX if kind.ge is not None else 2**31))
    if isinstance(kind, msgspec.inspect.StrType):
        return texts
    if isinstance(kind, msgspec.inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, msgspec.inspect.BoolType):
        return st.booleans()
    if isinstance(kind, msgspec.inspect.FloatType):
        return finite
    if isinstance(kind, msgspec.inspect.NoneType):
        return st.none()
    if isinstance(kind, msgspec.inspect.UnionType):
        return st.one_of([values(name, option) for option in kind.types])
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return st.lists(values(name, kind.item_type), max_size=3).map(tuple)
    if isinstance(kind, msgspec.inspect.DictType):
        return st.dictionaries(texts, values(name, kind.value_type), max_size=3)
    if isinstance(kind, msgspec.inspect.StructType):
        return built(kind.cls)
    assert isinstance(kind, msgspec.inspect.AnyType), kind
    return json_values


def built(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any message, or part of one, of a kind, found out from its fields."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(kind, **{field.name: values(field.name, field.type) for field in info.fields})


@given(st.one_of([built(kind) for kind in INCOMING]))
def test_what_a_trainer_sends_is_what_a_daemon_receives(message: Message) -> None:
    assert decode_incoming(encode(message)) == message


@given(st.one_of([built(kind) for kind in OUTGOING]))
def test_what_a_daemon_sends_is_what_a_trainer_receives(message: Message) -> None:
    assert decode_outgoing(encode(message)) == message


def test_every_message_has_a_direction_and_a_name_of_its_own() -> None:
    kinds = {
        found
        for found in vars(messages).values()
        if isinstance(found, type) and issubclass(found, Message) and found not in (Message, messages.Request)
    }
    assert kinds == {*INCOMING, *OUTGOING}
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", INCOMING)
def test_a_message_in_the_wrong_direction_is_refused(kind: type[Message]) -> None:
    data = json.dumps({"type": kind.__struct_config__.tag}).encode()
    with pytest.raises(ProtocolError):
        decode_outgoing(data)


HOSTILE = [
    b"",
    b"\xff",
    b"\x80\x04K\x01.",
    b"null",
    b"[]",
    b"{}",
    b'{"type":"nobody"}',
    b'{"type":1}',
    b'{"type":"get_status","request":-1}',
    b'{"type":"get_status","request":9223372036854775808}',
    b'{"type":"get_status","request":' + b"9" * 10_000 + b"}",
    b'{"type":"get_status","request":1.5}',
    b'{"type":"get_status","request":NaN}',
    b'{"type":"await_idle","deadline_seconds":1e999}',
    b'{"type":"sealed","at":{"arena":"a","slot":16,"ticket":1}}',
    b'{"type":"sealed","at":{"arena":"a","slot":-1,"ticket":1}}',
    b'{"type":"sealed","at":null}',
    b'{"type":"hello"}',
    b'{"type":"hello","keep":' + b"[" * 100_000,
    b'{"type":"skip","step":1,"generation":1,"run":"\xff","reason":""}',
    b'{"type":"get_status"}x',
    b'{"type":"status","status":' + b'{"a":' * 100_000,
    b'{"type":"durable","at":{"arena":"a","slot":1,"ticket":1},"stats":{"a":null}}',
]


@pytest.mark.parametrize("data", HOSTILE)
def test_hostile_bytes_raise_only_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_incoming(data)
    with pytest.raises(ProtocolError):
        decode_outgoing(data)


@given(st.binary(max_size=100), st.one_of([built(kind) for kind in (*INCOMING, *OUTGOING)]), st.data())
def test_any_bytes_raise_only_protocol_error(junk: bytes, message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for raw in (junk, bytes(damaged), encode(message)[:-1]):
        for decode in (decode_incoming, decode_outgoing):
            with contextlib.suppress(ProtocolError):
                decode(raw)


def test_unknown_members_are_ignored() -> None:
    assert decode_incoming(b'{"type":"get_status","request":3,"later":[1]}') == GetStatus(request=3)


def test_a_message_over_the_limit_is_not_sent() -> None:
    room = MESSAGE_BYTES_MAX - len(encode(Refused(error="", message="")))
    assert len(encode(Refused(error="", message="x" * room))) == MESSAGE_BYTES_MAX
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Refused(error="", message="x" * (room + 1)))


@pytest.mark.parametrize("value", [object(), "\ud800", {1j: 1}])
def test_what_json_cannot_carry_is_a_protocol_error_without_its_value(value: object) -> None:
    hello = Hello(
        protocol=1,
        tiers=(TierOfRun(url="", storage_options={"secret": "hunter2", "more": value}),),
        rank=0,
        world=1,
        launch="",
    )
    with pytest.raises(ProtocolError) as caught:
        encode(hello)
    assert "hunter2" not in str(caught.value)


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptdError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_cross_the_socket_with_class_and_hint(kind: type[CkptdError]) -> None:
    sent = kind("what happened", hint="what to do")
    back = decode_outgoing(encode(refusal(4, sent)))
    assert isinstance(back, Refused)
    assert back.request == 4
    error = as_error(back)
    assert type(error) is kind
    assert (error.message, error.hint) == ("what happened", "what to do")


def test_the_key_of_a_storage_error_crosses_in_its_message() -> None:
    error = as_error(refusal(0, NotFound("no such object", key="a/b")))
    assert str(error) == "a/b: no such object"


def test_a_foreign_error_becomes_the_daemons() -> None:
    error = as_error(refusal(0, ZeroDivisionError("division by zero")))
    assert type(error) is DaemonError
    assert str(error) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["", "ErrorOfLater", "ClassVar", "annotations", "__name__", "__class__", "first_line"])
def test_an_unknown_class_becomes_a_daemon_error(name: str) -> None:
    error = as_error(Failed(step=1, generation=1, stage="write", error=name, message="m"))
    assert type(error) is DaemonError


def test_a_known_class_is_made_again() -> None:
    failed = Failed(step=1, generation=1, stage="commit", error="UsageError", message="m", hint="h")
    assert isinstance(as_error(failed), UsageError)
