"""Plain containers of the caller: dicts and lists of tensors, plain values and objects, updated where they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch

from ckptd.format.names import element, join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedArray, SavedGenerator, SavedTensor
from ckptd_client.capture.restore import Restoring
from ckptd_client.capture.walk import FindSource

Build = Callable[[], object]
"""Makes what is to stand in the place of a value: the live object itself where it is updated in place."""

_ABSENT = object()
"""Stands for a live value where there is none, and stays where nothing is taken for it."""


def merge(live: object, saved: object, path: Path, restoring: Restoring, find: FindSource) -> Build:
    """Plan how a saved value gets to where the live one stands.

    Tensors, arrays, generators and objects with a state of their own are updated in place and must be on both sides.
    Dicts and lists stay the same objects and get the saved contents: lengths and new keys come from the checkpoint.
    """
    where = join(path)
    source = find(live, path)
    if source is not None:
        source.prepare(saved, restoring)
        return lambda: live
    if not (_is_container(live) and _is_container(saved)) and not (
        restoring.takes(where) and restoring.can_be_had(where, saved)
    ):
        return lambda: live
    match live, saved:
        case torch.Tensor(), SavedTensor():
            return _merge_tensor(live, saved, where, restoring)
        case torch.Generator(), SavedGenerator(_, state):
            state_tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            restoring.last(lambda: live.set_state(state_tensor))
            restoring.loaded.append(where)
            return lambda: live
        case (torch.Tensor() | torch.Generator(), _):
            restoring.mismatch(where, f"a {type(live).__name__} here, and something else in the checkpoint")
            return lambda: live
        case dict(), dict():
            return _merge_dict(cast("dict[Any, object]", live), cast("dict[Any, object]", saved), path, restoring, find)
        case list(), list():
            return _merge_list(cast("list[object]", live), cast("list[object]", saved), path, restoring, find)
        case tuple(), tuple():
            items = _merge_items(cast("list[object]", live), cast("list[object]", saved), path, restoring, find)
            return lambda: tuple(_in_place(item() for item in items))
        case np.ndarray(), SavedArray():
            return _merge_array(live, saved, where, restoring)
        case _:
            restoring.loaded.append(where)
            restoring.contents.want_all(saved)
            return lambda: restoring.contents.value(saved)


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | tuple)


def _merge_tensor(live: torch.Tensor, saved: SavedTensor, where: str, restoring: Restoring) -> Build:
    if restoring.copy(where, saved):
        return lambda: live
    restoring.contents.want(saved)
    return lambda: restoring.contents.value(saved, live.device)


def _merge_array(live: np.ndarray[Any, Any], saved: SavedArray, where: str, restoring: Restoring) -> Build:
    restoring.loaded.append(where)
    restoring.contents.want(saved.tensor)
    entry = restoring.contents.entry(saved.tensor)
    if live.dtype.str != saved.dtype or live.shape != entry.shape or not live.flags.writeable:
        return lambda: restoring.contents.value(saved)
    restoring.build(
        lambda: restoring.contents.value(saved),
        lambda value: np.copyto(live, cast("np.ndarray[Any, Any]", value)),
    )
    return lambda: live


def _merge_dict(
    live: dict[Any, object], saved: dict[Any, object], path: Path, restoring: Restoring, find: FindSource
) -> Build:
    absent = [join((*path, segment(key))) for key in live if key not in saved]
    restoring.missing += [name for name in absent if restoring.takes(name)]
    items = {
        key: merge(live.get(key, _ABSENT), item, (*path, segment(key)), restoring, find) for key, item in saved.items()
    }

    def put(value: object) -> None:
        made = cast("dict[Any, object]", value)
        contents = {key: item for key, item in made.items() if item is not _ABSENT}
        kept = {key: item for key, item in live.items() if key not in contents}
        live.clear()
        live.update(contents)
        live.update(kept)

    restoring.build(lambda: {key: item() for key, item in items.items()}, put)
    return lambda: live


def _merge_list(live: list[object], saved: list[object], path: Path, restoring: Restoring, find: FindSource) -> Build:
    items = _merge_items(live, saved, path, restoring, find)

    def put(value: object) -> None:
        live[:] = cast("list[object]", value)

    restoring.build(lambda: _in_place(item() for item in items), put)
    return lambda: live


def _merge_items(
    live: list[object] | tuple[object, ...],
    saved: list[object] | tuple[object, ...],
    path: Path,
    restoring: Restoring,
    find: FindSource,
) -> list[Build]:
    items = [
        merge(live[i] if i < len(live) else _ABSENT, item, (*path, element(i)), restoring, find)
        for i, item in enumerate(saved)
    ]
    for i in range(len(saved), len(live)):
        where = join((*path, element(i)))
        taken = restoring.takes(where)
        if taken and find(live[i], (*path, element(i))) is None:
            continue  # as long as it was; but an object cannot be made from its absence
        if taken:
            restoring.missing.append(where)
        items.append(functools.partial(live.__getitem__, i))
    return items


def _in_place(items: Iterable[object]) -> list[object]:
    """What was taken keeps its place: before it, ``None`` stands for what was not and is not there."""
    found = list(items)
    while found and found[-1] is _ABSENT:
        found.pop()
    return [None if item is _ABSENT else item for item in found]
