"""Writes the golden directories: ``python -m tests.golden.write --regenerate v1_any_layout``.

May be run only for a folder that no release has written yet; name it. After a release its folder is never touched
again, whatever the code has become: what readers of that version must be able to read lies there. A new format version,
or a new case, gets a new folder; an old one is not edited to make a test pass.

``v1`` is what the first release wrote, ``v1_any_layout`` what came with grids, resident pieces and common trees,
``v1_incremental`` what came with references, ``v2`` the same in the format of their own.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ckptd.checkpoint import unchanged
from ckptd.format import index, proof
from ckptd.format.digests import hex_digest
from ckptd.format.dtypes import ITEM_BYTES
from ckptd.format.keys import RUN as RUN_KEY
from ckptd.format.keys import (
    Version,
    generation_key,
    manifest_key,
    mark_key,
    receipt_key,
    shard_key,
    tombstone_key,
)
from ckptd.format.proof import prove
from ckptd.format.records import (
    Box,
    GenerationRecord,
    Lease,
    Mark,
    Parent,
    Receipt,
    Run,
    Skipped,
    Span,
    Tombstone,
    decode,
    encode,
)
from ckptd.format.tree import encode_tree
from tests.format.saved import RUN, Held, Rank, whole

FOLDER = Path(__file__).parent
EARLY = "v1"
SMALL_INDEX = {"INDEX_INLINE_BYTES_MAX": 200, "INDEX_PART_BYTES_TARGET": 400}
"""Limits under which the cases ``index_in_parts`` and ``large_world`` were written, so that they are small."""
SMALL_LISTS = {"RECEIPTS_INLINE_MAX": 2}
"""The same for ``large_world``."""

Files = dict[str, bytes]


def committed(ranks: Sequence[Rank], *, early: bool = True) -> Files:
    """All objects of one committed checkpoint. ``early``: as the first release wrote it."""
    version, world = ranks[0].version, len(ranks)
    receipts = [rank.receipt() for rank in ranks]
    files = {shard_key(version, rank.rank, world, rank.attempt): rank.stored()[1] for rank in ranks}
    files |= {receipt_key(version, rank.rank, world): receipt for rank, receipt in zip(ranks, receipts, strict=True)}
    commit = prove(receipts, early=early)
    return {**files, **commit.objects, manifest_key(version): encode(commit.manifest)}


def opened(generation: int, world: int = 1, opened_from: Version | None = None) -> Files:
    """The record of a generation, and that of the run."""
    parent = opened_from and Parent(generation=opened_from.generation, step=opened_from.step)
    record = GenerationRecord(
        generation=generation,
        host="node-1",
        launch=f"launch#{generation - 1}",
        opened_from=parent,
        pid=4711,
        run=RUN,
        world=world,
    )
    return {RUN_KEY: encode(Run(run=RUN)), generation_key(generation): encode(record)}


def piece(name: str, dtype: str, shape: tuple[int, ...], wheres: Sequence[Box | Span]) -> Held:
    """Some pieces of a tensor, each filled with a pattern."""
    pieces = []
    for number, where in enumerate(wheres):
        count = math.prod(where.lengths) if isinstance(where, Box) else where.stop - where.start
        pieces.append((where, bytes((number + 3 * i) % 256 for i in range(count * ITEM_BYTES[dtype]))))
    return Held(name, dtype, shape, pieces)


def tensor(name: str) -> dict[str, Any]:
    """A reference in the state tree."""
    return {"$": "tensor", "v": name}


class _Node:
    """A value that another module's codec has made a tagged object of."""

    def __init__(self, node: dict[str, Any]) -> None:
        self.node = node


PLAIN_STATE = {
    "none": None,
    "flags": [True, False],
    "integers": [0, -1, 2**53, -(2**53), 2**53 + 1, -(2**64), 10**40],
    "floats": [0.0, -0.0, 0.1, 1e16, 5e-324, math.inf, -math.inf, math.nan],
    "complex": [1 + 2j, complex(-0.0, math.nan)],
    "strings": ["", "a/b~c", "\N{SNOWMAN}", "\ud800", "\0"],
    "bytes": [b"", b"\0\xff", bytearray(b"abc")],
    "sequences": [(), (1, (2,)), {3, 1, 2}, frozenset({"a"}), deque([1, 2], maxlen=3), deque()],
    "dicts": [{}, OrderedDict(b=1, a=2), Counter({25: 1, 50: 2})],
    "keys": {"1": 0, 1: 1, None: 2, 2.5: 3, b"k": 4, ("a", 1): 5, "": 6, "__metadata__": 7},
    "of other modules": [
        _Node({"$": "enum", "class": "http:HTTPStatus", "v": 404}),
        _Node({"$": "npscalar", "dtype": "<f4", "v": "AACAPw=="}),
        _Node({"$": "ndarray", "dtype": "<f8", "v": tensor("plain/array")}),
        _Node({"$": "torch.dtype", "v": "bfloat16"}),
        _Node({"$": "torch.device", "v": "cuda:0"}),
        _Node({"$": "torch.Size", "v": [2, 3]}),
        _Node({"$": "torch.Generator", "device": "cpu", "v": "AAEC"}),
        _Node({"$": "codec", "name": "mine", "v": [1]}),
    ],
}


def _tree(state: dict[str, Any]) -> Any:
    return encode_tree(state, lambda value, _: value.node if isinstance(value, _Node) else None)


def one_rank() -> Files:
    """Every dtype, scalars, empty tensors, odd names, aliases, and a state tree with every type."""
    tensors = [whole(f"model/{dtype}", dtype, (2, 3)) for dtype in sorted(ITEM_BYTES)]
    tensors += [
        whole("model/scalar", "float32", ()),
        whole("model/empty", "int64", (0, 3)),
        whole("model/~e", "uint8", (1,)),
        whole("model/a~1b~0c", "uint8", (2,)),
        whole("model/~i1", "uint8", (3,)),
        whole("model/\N{SNOWMAN}~ud800;", "uint8", (4,)),
        whole("~m", "uint8", (5,)),
        whole("plain/array", "float64", (2,)),
        whole("rng/torch", "uint8", (16,), per_rank=True),
    ]
    model = [_Node(tensor(held.name)) for held in tensors]
    rank = Rank(
        tensors,
        step=10,
        parts=("model", "plain", "rng"),
        aliases={"model/tied": "model/float32", "model/also": "model/float32"},
        metrics={"loss": 0.25, "grad_norm": None, "lr": 1e-05},
        tree=_tree({"model": model, "plain": PLAIN_STATE, "rng": [model[-1]]}),
    )
    return {**opened(1), **committed([rank])}


def two_ranks() -> Files:
    """A matrix cut into boxes unevenly, a replica that rank 0 holds, values of each rank's own; the next generation
    goes on from it with one rank."""
    shape = (3, 5)
    boxes = [[Box((0, 0), (2, 5))], [Box((2, 0), (1, 2)), Box((2, 2), (1, 3))]]
    ranks = [
        Rank(
            [
                piece("model/w", "float32", shape, boxes[rank]),
                whole("model/bias", "bfloat16", (5,)) if rank == 0 else Held("model/bias", "bfloat16", (5,)),
                whole("loader/seen", "int64", (1 + rank,), per_rank=True, seed=rank),
            ],
            rank=rank,
            world=2,
            step=20,
            parts=("loader", "model"),
            metrics={"loss": 1.5},
            attempt=f"attempt-{rank}",
        )
        for rank in range(2)
    ]
    parent = ranks[0].version
    next_life = Rank(
        [whole("model/w", "float32", shape), whole("model/bias", "bfloat16", (5,))],
        step=30,
        generation=2,
        launch="launch#1",
        parent=parent,
    )
    return {**opened(1, world=2), **committed(ranks), **opened(2, opened_from=parent), **committed([next_life])}


def spans() -> Files:
    """A flat parameter cut where no row ends, one rank without any of it; one tensor in several pieces on a rank."""
    cuts = [[Span(0, 7), Span(10, 12)], [], [Span(7, 10)]]
    ranks = [
        Rank(
            [piece("flat", "float16", (4, 3), cuts[rank]), piece("empty", "float16", (0,), [Span(0, 0)])],
            rank=rank,
            world=3,
            step=5,
            parts=("flat",),
        )
        for rank in range(3)
    ]
    return {**opened(1, world=3), **committed(ranks)}


def index_in_parts() -> Files:
    """An index that is too large for the manifest."""
    with mock.patch.multiple(index, **SMALL_INDEX):
        return {**opened(1), **committed([Rank([whole(f"w{i}", "uint8", (i,)) for i in range(12)])])}


def around() -> Files:
    """What lies beside checkpoints: marks, leases, a tombstone, and a rank that took no part in a step."""
    version, process = Version(10, 1), "5f3c.4026531836:4711:99"
    files = {**opened(1, world=2)}
    for kind in ("verified", "suspect", "pinned", "unpinned", "unhealthy", "revoked", "debug"):
        mark = Mark(by="ckptd verify", mark=kind, reason="every block was read", version=str(version))
        files[mark_key(version, kind, f"{len(files):032x}")] = encode(mark)
    for purpose, about in (("writer", None), ("reader", str(version)), ("reference", str(version))):
        lease = Lease(holder="node-1, pid 4711, launch#0", process=process, purpose=purpose, version=about)
        files[f"leases/{purpose}-{about or hex_digest(b'launch')}-{'0' * 31}1-000000.json"] = encode(lease)
    files[tombstone_key(version)] = encode(Tombstone(reason="5 newer ones are committed", version=str(version)))
    skipped = Skipped(generation=1, rank=1, reason="no free slot within 30 s", run=RUN, step=20)
    files[receipt_key(Version(20, 1), 1, 2)] = encode(skipped)
    return files


def _cut(data: bytes, columns: int, box: Box) -> bytes:
    """A box of a matrix of bytes."""
    (top, left), (height, width) = box.offsets, box.lengths
    return b"".join(data[row * columns + left : row * columns + left + width] for row in range(top, top + height))


def _mesh_rank(rank: int) -> Rank:
    """One of six ranks: a mesh of 3 by 2, over which a 5 by 7 matrix is cut both ways; a parameter that all hold and
    rank 4 owns; values of each rank's own, of which one is equal on all."""
    shape, data = (5, 7), bytes(range(35))
    row, column = divmod(rank, 2)
    box = Box((2 * row, 4 * column), (min(2, 5 - 2 * row), min(4, 7 - 4 * column)))
    # The other way round: the first dimension over the pairs, the second over the triples.
    turned = Box((3 * column, 3 * row), (min(3, 5 - 3 * column), min(3, 7 - 3 * row)))
    shared = whole("model/norm", "bfloat16", (5,), seed=9)
    held = [
        Held("model/w", "uint8", shape, [(box, _cut(data, 7, box))]),
        Held("model/turned", "int8", shape, [(turned, _cut(data, 7, turned))]),
        shared if rank == 4 else Held("model/norm", "bfloat16", (5,), resident=shared.pieces),
        whole("model/scale", "float32", (), per_rank=True),
        whole("rng/cpu", "uint8", (5,), per_rank=True, seed=rank),
        Held("model/odd", "uint8", (6,), [(Span(rank, rank + 1), b"x")]),
    ]
    if rank in (1, 2):
        held.append(whole("model/twice", "int16", (3,)))
    tree = {
        "model": {"w": _Node(tensor("model/w")), "layers": [1, (2, rank), None], f"of {rank % 2}": rank % 2},
        "rng": {"cpu": _Node(tensor("rng/cpu")), "seed": rank},
    }
    return Rank(
        held,
        rank=rank,
        world=6,
        parts=("model", "rng"),
        aliases={"model/tied": "model/w", "model/mine": "model/w" if rank else "model/norm"},
        tree=_tree(tree),
        block_bytes=65536,
        check_replicas=True,
    )


def mesh() -> Files:
    """Grids with a run and with a list of ranks, ranges that are no grid, a part that two ranks saved, resident pieces,
    equal and different values of the ranks' own, and what their trees have in common."""
    return {**opened(1, world=6), **committed([_mesh_rank(rank) for rank in range(6)], early=False)}


def fine_blocks() -> Files:
    """One rank with blocks of 64 KiB; its own values are the world's."""
    held = [whole("model/w", "uint8", (65536 + 1,)), whole("rng/torch", "uint8", (16,), per_rank=True)]
    return {**opened(1), **committed([Rank(held, parts=("model", "rng"), block_bytes=65536)], early=False)}


def large_world() -> Files:
    """More ranks than a manifest lists, and an index in parts with lists of ranks."""
    world = 5
    ranks = [
        Rank(
            [Held(f"w{i}", "uint8", (world,), [(Box(((rank + i) % world,), (1,)), bytes([rank]))]) for i in range(6)],
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]
    with mock.patch.multiple(index, **SMALL_INDEX), mock.patch.multiple(proof, **SMALL_LISTS):
        return {**opened(1, world=world), **committed(ranks, early=False)}


def _after(rank: Rank, base: Rank) -> Rank:
    """The same, where what is unchanged is left where it is."""
    with mock.patch.object(unchanged, "REFERENCED_SHARE_MIN", 0):
        state = unchanged.described(decode(rank.receipt(), Receipt))
        return replace(rank, references=unchanged.unchanged(base.receipt(), state))


def frozen(version: int = 1) -> Files:
    """Layers that freeze one after the other: references to one checkpoint and to several, to whole tensors, boxes and
    ranges, to one of an earlier generation; at last there is nothing left to store. ``version``: of the format."""
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (1, 4))]

    def rank(step: int, head: int, rng: int, **more: Any) -> Rank:
        held = [
            whole("model/embedding", "float32", (40, 3)),
            piece("model/cut", "int16", (3, 4), boxes),
            whole("model/head", "bfloat16", (35_001,), seed=head),
            whole("model/empty", "float32", (0,)),
            piece("model/flat", "uint8", (9,), [Span(0, 4), Span(4, 9)]),
            whole("rng/torch", "uint8", (16,), per_rank=True, seed=rng),
        ]
        more |= {"block_bytes": 65536, "attempt": f"attempt-{step}", "format": 1 if version == 1 else 0}
        return Rank(held, step=step, parts=("model", "rng"), **more)

    first = rank(10, 1, 1)
    second = _after(rank(20, 2, 2), first)
    life = {"generation": 2, "launch": "launch#1", "parent": second.version}
    third = _after(rank(30, 2, 3, **life), second)
    fourth = _after(rank(40, 2, 3, **life), third)
    made = [committed([one], early=False) for one in (first, second, third, fourth)]
    return {**opened(1), **opened(2, opened_from=second.version), **made[0], **made[1], **made[2], **made[3]}


CASES = {f"{EARLY}/{made.__name__}": made for made in (one_rank, two_ranks, spans, index_in_parts, around)}
CASES |= {f"v1_any_layout/{made.__name__}": made for made in (mesh, fine_blocks, large_world)}
CASES |= {"v1_incremental/frozen": frozen, "v2/frozen": partial(frozen, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = sorted({name.split("/")[0] for name in CASES})
    parser.add_argument("--regenerate", required=True, choices=folders, help="overwrite it")
    folder: str = parser.parse_args().regenerate
    shutil.rmtree(FOLDER / folder, ignore_errors=True)
    for name, make in ((name, make) for name, make in CASES.items() if name.startswith(f"{folder}/")):
        for key, data in make().items():
            path = FOLDER / name / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    main()
