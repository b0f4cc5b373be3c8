"""What is measured under a name: the states, how often, and with whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.settings import MB, Settings
from bench.subjects import FLOOR, OURS, OURS_EAGER, OVERLAPPED_FLOOR, SUBJECTS

GB = 1000 * MB

VARIANTS = ("dcp.async_save, thread, kept stager", "orbax")
"""Ways that peers have too, and that are not as they come, or not the best."""
MAIN = tuple(name for name in SUBJECTS if name not in VARIANTS)
ONE_OF_EACH = (
    FLOOR,
    OVERLAPPED_FLOOR,
    OURS,
    OURS_EAGER,
    "torch.save",
    "safetensors",
    "dcp.save",
    "dcp.async_save, thread",
    "dcp.async_save, process, all options",
    "dcp experimental",
    "torch_checkpointing, buffered",
    "torchsnapshot",
    "dlrover flash",
    "nvrx async, fork",
    "orbax, no compression",
)
"""Each peer once, in its best way."""
FASTEST = (
    FLOOR,
    OVERLAPPED_FLOOR,
    OURS,
    OURS_EAGER,
    "torch.save",
    "dcp experimental",
    "dlrover flash",
    "torchsnapshot",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs under one name."""

    what: str
    """With how long it takes on two quiet cores, once the peers' environments are there."""
    runs: tuple[Settings, ...]
    subjects: tuple[str, ...]


_ONCE = Settings(state_bytes=1500 * MB, rounds=1, saves=5, warm_ups=0, restores=1, step_seconds=0.25, window_steps=2)
_SHORT = replace(_ONCE, saves=2, state_bytes=64 * MB, step_seconds=0.05, window_steps=3, turn_seconds=90)
_MANY = replace(_SHORT, saves=5, state_bytes=128 * MB, turn_seconds=300)

PLANS: Mapping[str, Plan] = {
    "main": Plan("1.5 GB in fp32, all peers, five saves each: about 12 minutes", (_ONCE,), MAIN),
    "many-tensors": Plan(
        "64 MB in 20,000 tensors, each peer once, two saves: about 4 minutes",
        (replace(_SHORT, tensors=20_000),),
        ONE_OF_EACH,
    ),
    "lost": Plan(
        "as main, 20 saves in four alternating rounds, for the interval of the lost time: about 50 minutes",
        (replace(_ONCE, rounds=4, warm_ups=1, window_steps=4, label="lost"),),
        ONE_OF_EACH,
    ),
    "variants": Plan(
        "as main, other ways of some peers: about 4 minutes",
        (replace(_ONCE, label="variants"),),
        (FLOOR, OVERLAPPED_FLOOR, OURS, OURS_EAGER, *VARIANTS),
    ),
    "bf16": Plan(
        "1.5 GB, parameters in bf16 with masters in fp32: about 9 minutes",
        (replace(_ONCE, dtype="bf16"),),
        ONE_OF_EACH,
    ),
    "sizes": Plan(
        "64 MB to 6 GB, or as much as memory takes: about 25 minutes",
        tuple(
            replace(_ONCE, state_bytes=size, label="sizes") for size in (64 * MB, 512 * MB, 1500 * MB, 4 * GB, 6 * GB)
        ),
        FASTEST,
    ),
    "tensors": Plan(
        "128 MB in 100, 2,000 and 20,000 tensors: about 20 minutes",
        tuple(replace(_MANY, tensors=count) for count in (100, 2_000, 20_000)),
        ONE_OF_EACH,
    ),
}
