"""JSON that means one thing: no object has a member twice.

Of two equal members the decoder keeps the last in silence, and another program may keep the first.
"""

from __future__ import annotations

import json

from ckptd.errors import FormatError


def refuse_duplicates(data: bytes | memoryview, canonical: bytes) -> None:
    """Raise :class:`FormatError` where an object in the JSON text ``data`` has a member twice.

    ``canonical``: what was decoded from ``data``, encoded again. Equal bytes are proof, at the speed of the encoder;
    only another spelling is looked through member by member.
    """
    if bytes(data) == canonical:
        return
    try:
        json.loads(str(data, "utf-8"), object_pairs_hook=_check_members)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from None


def _check_members(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise FormatError(f"an object has the member {name[:40]!r} twice")
        seen.add(name)
