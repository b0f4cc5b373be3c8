"""States that another number of ranks takes over: what each rank had saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.errors import CkptdError, from_fields, to_fields
from ckptd.format.keys import Version
from ckptd.format.tree import decode_json
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture.nodes import node_at
from ckptd_client.nearest import from_nearest
from ckptd_client.roots import Root

EachRanks = Mapping[str, Sequence[Any]] | CkptdError
"""By name of an object, the node of each rank that saved it; or why that cannot be read."""


def states_of_each_rank(
    agreement: Agreement, roots: Sequence[Root], version: Version, names: Sequence[str]
) -> EachRanks:
    """Empty on as many ranks as saved. Read once, by rank 0. Called on all ranks."""
    if not names:
        return {}

    def read(_: object) -> list[Any]:
        try:
            found = from_nearest(roots, lambda root: run_blocking(_read(agreement.world, root, version, names)))
            return [found.value, None]
        except CkptdError as error:
            return [None, to_fields(error)]

    states, error = agreement.decide("states", None, read)
    return states if error is None else from_fields(error["error"], error["message"], error["hint"])


async def _read(world: int, root: Root, version: Version, names: Sequence[str]) -> dict[str, list[Any]]:
    async with (
        root.visit() as backend,
        await CheckpointReader.open(await Run.open(backend), version, holder=root.holder) as reader,
    ):
        saved_world = reader.manifest.world
        if saved_world == world:
            return {}
        found: dict[str, list[Any]] = {name: [] for name in names}
        for rank in range(saved_world):
            tree = decode_json(bytes((await reader.receipt(rank)).snapshot.tree))
            for name in names:
                found[name].append(node_at(tree, name))
    return {name: nodes for name, nodes in found.items() if all(node is not None for node in nodes)}
