"""A daemon that does not understand a request says so in answer to it, and does not merely hang up."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ckptd.daemon.connection import Connection
from ckptd.errors import ProtocolError
from ckptd.wire.channel import Peer
from ckptd.wire.messages import GetStatus, Incoming, Refused, as_error, decode_outgoing, encode, request_number


async def answer(data: bytes) -> Refused:
    """What a client hears that sends this."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closed = asyncio.Event()

    def refuse(message: Incoming, fd: int | None) -> None:
        raise ProtocolError("the first message is hello")

    Connection(theirs, Peer(1, 1, 1), received=refuse, closed=closed.set)
    ours.send(data)
    async with asyncio.timeout(30):
        await closed.wait()
    with ours:
        reply = decode_outgoing(ours.recv(65536))
        assert ours.recv(1) == b""
    assert isinstance(reply, Refused)
    return reply


@pytest.mark.parametrize(
    ("data", "request_", "said"),
    [
        (b'{"type":"hello","request":7,"protocol":3,"tiers":[{"url":"x","keep":3}]}', 7, r"Expected `object`.*keep"),
        (b'{"type":"nosuch","request":8}', 8, "nosuch"),
        (b'{"request":-1}', 0, "not a message"),
        (b"\xff", 0, "not a message"),
        (encode(GetStatus(request=9)), 9, "the first message is hello"),
    ],
)
async def test_what_is_wrong_is_said_in_answer_to_the_request(data: bytes, request_: int, said: str) -> None:
    refused = await answer(data)
    assert refused.request == request_
    with pytest.raises(ProtocolError, match=said):
        raise as_error(refused)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"request":"a"}', b"[" * 5000, b'{"request":1e99}'])
def test_no_number_is_made_of_what_has_none(data: bytes) -> None:
    assert request_number(data) == 0
