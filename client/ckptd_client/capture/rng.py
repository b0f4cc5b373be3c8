"""Random number generators of the process: python's, numpy's, torch's, and every CUDA device's, as plain data."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ckptd.errors import StateError, first_line
from ckptd_client.capture.codecs import PerRank
from ckptd_client.capture.stored import Ranks
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

RNG = "rng"
"""The name of this part of the state."""


class RngSource(Source):
    """The generators that code without one of its own draws from."""

    def walk(self, walk: Walk) -> Any:
        return walk.value(_state(), (RNG,))

    def prepare(self, saved: object, restoring: Restoring) -> None:
        """On as many ranks as saved, exactly what was saved. On another number, what was equal on all ranks is taken as
        it is, and the rest is derived: see :func:`_derived`."""
        try:
            state, derived = _for_this_rank(saved, restoring.contents.ranks)
            _rehearse(state)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise StateError(
                f"{RNG}: the checkpoint's random-number state cannot be used: {first_line(error)}",
                hint="to go on with other random numbers, open the checkpointer with rng=False",
            ) from error
        if derived:
            ranks = restoring.contents.ranks
            restoring.notices.append(
                f"{RNG}: saved by {ranks.saved_world} ranks and restored by {ranks.world}: the streams of "
                f"{', '.join(derived)} are new ones, derived from the checkpoint and the rank"
            )
        kept, here = len(state["cuda"]), torch.cuda.device_count()
        for number in range(here, kept):
            restoring.skip(f"{RNG}/cuda/~l{number}", "there is no such device here")
        if here > kept and kept:
            restoring.notices.append(f"{RNG}: CUDA devices {kept} to {here - 1} keep their state: it was not saved")
        restoring.last(lambda: _restore(state))
        restoring.loaded.append(RNG)


def _for_this_rank(saved: Any, ranks: Ranks) -> tuple[dict[str, Any], list[str]]:
    """The state to be set, and the names of the generators that get a new stream."""
    state: dict[str, Any] = {}
    derived: list[str] = []
    for kind in ("python", "numpy", "torch", "cuda"):
        value: Any = saved if isinstance(saved, PerRank) else saved[kind]
        if _holds_per_rank(value):
            derived.append(kind)
            value = _derived(kind, ranks)
        state[kind] = value
    return state, derived


def _holds_per_rank(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_per_rank, cast("list[Any]", value)))
    return isinstance(value, PerRank)


def _derived(kind: str, ranks: Ranks) -> Any:
    """A stream of its own for this rank, in a world of another size than the one that saved: seeded with 64 bits of
    BLAKE2b over the checkpoint's identity, the kind of generator, the new world size and the rank. The same at every
    restore of this checkpoint on so many ranks, and not the stream of any rank that saved."""
    text = f"ckptd rng/{ranks.identity}/{kind}/{ranks.world}/{ranks.rank}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    match kind:
        case "python":
            version, words, gauss_next = random.Random(seed).getstate()
            return version, _packed(words), gauss_next
        case "numpy":
            state: Any = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).get_state(legacy=True)
            return state[0], _packed(state[1]), int(state[2]), int(state[3]), float(state[4])
        case "torch":
            return _bytes(torch.Generator().manual_seed(seed).get_state())
        case _:
            devices = range(_cuda_devices_in_use())
            return [_bytes(torch.Generator(f"cuda:{n}").manual_seed(seed + n).get_state()) for n in devices]


def _state() -> dict[str, Any]:
    version, words, gauss_next = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": (version, _packed(words), gauss_next),
        "numpy": (kind, _packed(keys), int(position), int(has_gauss), float(gauss)),
        "torch": _bytes(torch.get_rng_state()),
        "cuda": [_bytes(torch.cuda.get_rng_state(device)) for device in range(_cuda_devices_in_use())],
    }


def _cuda_devices_in_use() -> int:
    """None before CUDA is in use: asking for their state would start it."""
    return torch.cuda.device_count() if cast(Any, torch.cuda).is_initialized() else 0


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _packed(words: Any) -> bytes:
    """Words of 32 bits, little-endian; the hundreds of them as numbers would be most of the tree's cost."""
    return np.asarray(words, "<u4").tobytes()


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, words, gauss_next = saved
    return version, tuple(np.frombuffer(words, "<u4").tolist()), gauss_next


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, gauss = saved
    return kind, np.frombuffer(keys, "<u4"), position, has_gauss, gauss


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _rehearse(state: dict[str, Any]) -> None:
    """Set all of it into generators that nobody uses; raises what a generator raises that does not take it."""
    random.Random().setstate(_python_state(state["python"]))
    np.random.RandomState(0).set_state(_numpy_state(state["numpy"]))
    torch.Generator().set_state(_tensor(state["torch"]))
    for device in state["cuda"]:
        _tensor(device)


def _restore(state: dict[str, Any]) -> None:
    random.setstate(_python_state(state["python"]))
    np.random.set_state(_numpy_state(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    for device in range(min(len(state["cuda"]), torch.cuda.device_count())):
        torch.cuda.set_rng_state(_tensor(state["cuda"][device]), device)
