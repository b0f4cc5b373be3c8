"""The line of a run: which committed checkpoints lead to its newest state.

Lineage is made by commits. The line starts in the newest generation that has committed, and goes on from the
checkpoint from which that generation was opened. A generation without a manifest orphans nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.format.keys import Version


def line(committed: Iterable[Version], parents: Mapping[int, Version | None]) -> list[Version]:
    """The committed checkpoints on the line, newest first.

    ``parents``: generation → the checkpoint from which it was opened, ``None`` for a start from nothing. A generation
    that is not in ``parents`` is taken as started from nothing.
    """
    by_generation: dict[int, list[int]] = {}
    for version in committed:
        by_generation.setdefault(version.generation, []).append(version.step)
    found: list[Version] = []
    generation = max(by_generation, default=None)
    step_max: int | None = None
    while generation is not None:
        steps = sorted(by_generation.get(generation, []), reverse=True)
        found += [Version(step, generation) for step in steps if step_max is None or step <= step_max]
        parent = parents.get(generation)
        # A parent is always older, so this ends even where records lie.
        if parent is None or parent.generation >= generation:
            break
        generation, step_max = parent.generation, parent.step
    return found
