"""What a run and a checkpoint hold, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import RECORDS_IN_FLIGHT, Run
from ckptd.checkpoint.standing import UNMARKED
from ckptd.checkpoint.tensors import StoredTensor, of_index, of_rank
from ckptd.errors import FormatError, IntegrityError, NoCheckpoint
from ckptd.format.keys import MANIFESTS, Version, manifest_key
from ckptd.format.records import Manifest, Mark, ShardProof


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint in a listing."""

    version: Version
    committed: bool
    on_line: bool
    modified_seconds: float
    """When it was committed, by the store's clock; 0 where it was not."""
    manifest: Manifest | None
    """``None`` where it is not committed, or cannot be read."""
    notes: tuple[str, ...]
    """What is worth saying: off the line, incomplete, pinned …"""


async def list_run(run: Run) -> list[Listed]:
    """Everything there is of a run: its line from the newest on, then what lies beside it, then what is incomplete."""
    line = await run.line()
    beside = [version for version in reversed(await run.committed()) if version not in set(line)]
    incomplete = list(reversed(await run.incomplete()))
    modified = {info.key: info.modified_seconds async for info in run.backend.scan(MANIFESTS)}
    standings = await run.standings()

    async def look(version: Version) -> Listed:
        notes = [*standings.get(version, UNMARKED).words]
        committed, on_line = version not in incomplete, version in line
        if not committed:
            notes.append("incomplete, never used")
        elif not on_line:
            notes.append("off the line")
        manifest = None
        if committed:
            try:
                manifest = await run.manifest(version)
            except (FormatError, IntegrityError, NoCheckpoint) as error:
                notes.append(error.message)
        return Listed(version, committed, on_line, modified.get(manifest_key(version), 0.0), manifest, tuple(notes))

    return await each([*line, *beside, *incomplete], RECORDS_IN_FLIGHT, look)


@dataclass(frozen=True, slots=True)
class Shown:
    """One checkpoint, looked at closely. Nothing of its tensors' bytes was read."""

    manifest: Manifest
    marks: tuple[Mark, ...]
    shards: tuple[ShardProof, ...]
    """In order of rank."""
    tensors: tuple[tuple[int | None, StoredTensor], ...]
    """In order of name, each with its rank; ``None`` for one value of the whole world."""
    aliases: dict[str, str]


async def show_checkpoint(run: Run, version: Version) -> Shown:
    """Raises as :meth:`CheckpointReader.open` does."""
    async with await CheckpointReader.open(run, version) as reader:
        tensors: list[tuple[int | None, StoredTensor]] = [(None, of_index(entry)) async for entry in reader.entries()]
        shards: list[ShardProof] = []
        for rank in range(reader.manifest.world):
            receipt, _, layout = await reader.receipt(rank)
            shards.append(receipt.shard)
            tensors += [
                (rank, of_rank(entry, rank))
                for entry in layout.tensors
                if entry.per_rank and await reader.find(entry.name) is None
            ]
        tensors.sort(key=lambda item: (item[1].name, -1 if item[0] is None else item[0]))
        marks, aliases = await run.marks(version), dict(await reader.aliases())
        return Shown(reader.manifest, tuple(marks), tuple(shards), tuple(tensors), aliases)
