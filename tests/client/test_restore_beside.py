"""What goes on beside a restore: its arena waits, the next generation is opened, the mark is put."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, DaemonError, MismatchError
from ckptd_client import Checkpointer, supply
from ckptd_client.generation import WriterClaim
from ckptd_client.supply import ArenaSupply
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training

Open = Callable[..., Checkpointer]
Start = Callable[..., Daemon]


class Picky:
    """Takes what it had saved only where it is told to."""

    def __init__(self) -> None:
        self.takes = True
        self.seen: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen()
        if not self.takes:
            raise ValueError("not today")


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def saved(open_ckpt: Open, url: str, **options: Any) -> tuple[Training, Picky]:
    training, picky = Training(), Picky()
    with open_ckpt(url, {**training.state, "picky": picky}, **options) as ckpt:
        ckpt.restore()
        training.step()
        ckpt.save(1).wait("committed", timeout=60)
    return training, picky


def test_no_arena_is_made_while_a_restore_goes_on(
    own_daemon: Start, tmp_run: str, open_ckpt: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "DELAY_SECONDS", 0.0)
    daemon = own_daemon()
    training, picky = saved(open_ckpt, tmp_run, socket=daemon.socket)
    daemon.kill()
    daemon.start()
    made = threading.Event()
    begun = threading.Event()
    make, asked = ArenaSupply._make_with, ArenaSupply._make  # pyright: ignore[reportPrivateUsage]

    def making(self: ArenaSupply, slots: int, slot_bytes: int) -> Any:
        made.set()
        return make(self, slots, slot_bytes)

    def waiting(self: ArenaSupply, slot_bytes: int) -> Any:
        # As where a restore follows at once: it is on before the first arena's turn comes.
        begun.wait(60)
        return asked(self, slot_bytes)

    monkeypatch.setattr(ArenaSupply, "_make_with", making)
    monkeypatch.setattr(ArenaSupply, "_make", waiting)
    during: list[bool] = []

    def look() -> None:
        begun.set()
        during.append(made.wait(0.5))

    picky.seen = look
    with open_ckpt(tmp_run, {**training.state, "picky": picky}, socket=daemon.socket) as ckpt:
        assert ckpt.restore().source == "storage"
        assert during == [False]
        wait_until(made.is_set, "the arena to be made after the restore", deadline_seconds=30)
        training.step()
        ckpt.save(2).wait("committed", timeout=60)


def test_a_first_save_does_not_wait_out_the_delay(
    tmp_run: str, open_ckpt: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "DELAY_SECONDS", 10_000.0)
    training = Training()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.save(1).wait("committed", timeout=60)  # without a restore, and at once


def test_closing_does_not_wait_for_an_arena_that_nobody_wants(
    tmp_run: str, open_ckpt: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "DELAY_SECONDS", 10_000.0)
    ckpt = open_ckpt(tmp_run, Training().state)
    waiting: Future[Any] | None = ckpt._supply._next  # pyright: ignore[reportPrivateUsage]
    assert waiting is not None
    ckpt.close()
    assert waiting.cancelled() or isinstance(waiting.exception(), DaemonError)


def test_a_restore_that_fails_at_the_last_gives_its_claim_up(tmp_run: str, open_ckpt: Open) -> None:
    training, picky = saved(open_ckpt, tmp_run)
    before = [tensor.clone() for tensor in training.parameters()]
    training.step()
    changed = training.parameters()
    picky.takes = False
    leases = folder_of(tmp_run) / "leases"
    with open_ckpt(tmp_run, {**training.state, "picky": picky}) as ckpt:
        with pytest.raises(MismatchError, match="not today"):
            ckpt.restore()
        assert all(map(torch.equal, training.parameters(), changed))  # P5
        assert list(leases.glob("writer-*")) == []
        picky.takes = True
        assert ckpt.restore().step == 1  # in the same session
        assert len(list(leases.glob("writer-*"))) == 1
        assert all(map(torch.equal, training.parameters(), before))
        training.step()
        save = ckpt.save(2)
        save.wait("committed", timeout=60)
        assert save.version.generation == 3  # the second was opened, and stays empty
    with open_ckpt(tmp_run, training.state) as ckpt:
        assert ckpt.restore(strict=False).step == 2  # and is in nobody's way


def test_what_was_read_by_all_is_marked_before_the_restore_returns(
    own_daemon: Start, tmp_run: str, open_ckpt: Open
) -> None:
    daemon = own_daemon()
    training, picky = saved(open_ckpt, tmp_run, socket=daemon.socket)
    daemon.kill()
    daemon.start()
    with open_ckpt(tmp_run, {**training.state, "picky": picky}, socket=daemon.socket) as ckpt:
        assert ckpt.restore().source == "storage"
        assert len(list(folder_of(tmp_run).glob("marks/000000000001-g000001/verified-*"))) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("ckptd-mark", "ckptd-claim"))]


def test_a_claim_that_cannot_be_had_is_told_once_the_state_is_there(
    tmp_run: str, open_ckpt: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, picky = saved(open_ckpt, tmp_run)
    hold = WriterClaim._claim  # pyright: ignore[reportPrivateUsage]
    failures = [CkptdError("no claim")]

    async def fail_once(self: WriterClaim, *args: Any) -> None:
        if failures:
            raise failures.pop()
        await hold(self, *args)

    monkeypatch.setattr(WriterClaim, "_claim", fail_once)
    with open_ckpt(tmp_run, {**training.state, "picky": picky}) as ckpt:
        with pytest.raises(CkptdError, match="no claim"):
            ckpt.restore()
        assert ckpt.restore().step == 1  # anew, and not with what had failed
        assert failures == []
