"""Exact cover: the pieces of a tensor hold every element once, no gap and no overlap."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.errors import CoverageError
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.records import Box, IndexPiece, Layout, Piece, Span
from ckptd.limits import PAGE_BYTES

Shape = tuple[int, ...]


def span_boxes(span: Span, shape: Shape) -> list[Box]:
    """A flat range as boxes: at most ``2 * len(shape) - 1`` of them, in row-major order."""
    if span.start >= span.stop:
        return []
    if not shape:
        return [Box((), ())]
    row = element_count(shape[1:])
    first, head = divmod(span.start, row)
    last, tail = divmod(span.stop, row)
    if first == last:
        return [_under(first, box) for box in span_boxes(Span(head, tail), shape[1:])]
    boxes: list[Box] = []
    if head:
        boxes += [_under(first, box) for box in span_boxes(Span(head, row), shape[1:])]
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += [_under(last, box) for box in span_boxes(Span(0, tail), shape[1:])]
    return boxes


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))


def boxes_of(piece: Piece | IndexPiece, shape: Shape) -> list[Box]:
    """The boxes that a piece covers."""
    if piece.box is not None:
        return [piece.box]
    if piece.span is not None:
        return span_boxes(piece.span, shape)
    return [Box((0,) * len(shape), shape)]


def piece_elements(piece: Piece | IndexPiece, shape: Shape) -> int:
    """How many elements a piece holds."""
    if piece.box is not None:
        return element_count(piece.box.lengths)
    if piece.span is not None:
        return max(piece.span.stop - piece.span.start, 0)
    return element_count(shape)


def check_piece(piece: Piece | IndexPiece, shape: Shape, dtype: str, name: str) -> None:
    """Raise :class:`CoverageError` unless the piece lies inside the tensor and has the bytes that it must have."""
    if piece.box is not None and piece.span is not None:
        raise CoverageError(f"{name}: a piece is a box or a range, not both")
    if piece.box is not None:
        box = piece.box
        inside = len(box.offsets) == len(box.lengths) == len(shape)
        # A plain loop, as a commit of a large world comes here millions of times.
        for offset, length, size in zip(box.offsets, box.lengths, shape, strict=False):
            inside = inside and offset + length <= size
        if not inside:
            raise CoverageError(f"{name}: box {box.offsets}+{box.lengths} does not lie in shape {shape}")
    if piece.span is not None and not piece.span.start <= piece.span.stop <= element_count(shape):
        raise CoverageError(f"{name}: range {piece.span.start}:{piece.span.stop} does not lie in shape {shape}")
    wanted = piece_elements(piece, shape) * ITEM_BYTES[dtype]
    if piece.bytes != wanted:
        raise CoverageError(f"{name}: a piece of {piece.bytes} bytes where its shape and dtype make {wanted}")


def check_cover(name: str, shape: Shape, pieces: Sequence[IndexPiece]) -> None:
    """Raise :class:`CoverageError`, naming the tensor and the ranks, unless the pieces cover it exactly once."""
    owned = [(box, piece.rank) for piece in pieces for box in boxes_of(piece, shape) if element_count(box.lengths)]
    _check_disjoint(name, shape, owned)
    found = sum(element_count(box.lengths) for box, _ in owned)
    if found != element_count(shape):
        raise not_covered(name, shape, found, sorted({rank for _, rank in owned}))


def not_covered(name: str, shape: Shape, found: int, ranks: Sequence[int]) -> CoverageError:
    """The error for a tensor of which ranks have saved only so many elements."""
    return CoverageError(
        f"{name}: {found} of {element_count(shape)} elements are covered, by ranks {ranks[:16] or 'none'}"
    )


def check_box_cover(name: str, wanted: Box, held: list[tuple[Box, int]]) -> None:
    """Raise :class:`CoverageError` unless parts of a box, with their ranks, none of them empty, are all of it exactly
    once."""
    _check_disjoint(name, wanted.lengths, held)
    found = sum(element_count(box.lengths) for box, _ in held)
    if found != element_count(wanted.lengths):
        raise not_covered(name, wanted.lengths, found, sorted({rank for _, rank in held}))


def clipped(box: Box, inside: Box) -> Box | None:
    """What two boxes have in common, or ``None``."""
    low = tuple(map(max, box.offsets, inside.offsets))
    high = tuple(
        min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.lengths, inside.offsets, inside.lengths, strict=True)
    )
    if any(top <= bottom for bottom, top in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(top - bottom for bottom, top in zip(low, high, strict=True)))


def _check_disjoint(name: str, shape: Shape, owned: list[tuple[Box, int]]) -> None:
    if len(owned) < 2:
        return
    if not shape:
        raise CoverageError(f"{name}: saved whole by ranks {owned[0][1]} and {owned[1][1]}")
    # Sweep along the dimension in which the pieces are spread most, so that few are open at a time.
    sweep = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box, _ in owned}))
    owned.sort(key=lambda item: item[0].offsets[sweep])
    open_boxes: list[tuple[Box, int]] = []
    for box, rank in owned:
        open_boxes = [(b, r) for b, r in open_boxes if b.offsets[sweep] + b.lengths[sweep] > box.offsets[sweep]]
        for other, other_rank in open_boxes:
            if _overlap(box, other):
                raise CoverageError(
                    f"{name}: ranks {other_rank} and {rank} both hold elements of "
                    f"{box.offsets}+{box.lengths} and {other.offsets}+{other.lengths}"
                )
        open_boxes.append((box, rank))


def _overlap(a: Box, b: Box) -> bool:
    return all(
        ao < bo + bn and bo < ao + an for ao, an, bo, bn in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    )


def pieces_in_file_order(layout: Layout) -> list[Piece]:
    """All pieces of a rank as they lie in its shard."""
    # An empty piece lies where the next one starts.
    return sorted((p for entry in layout.tensors for p in entry.pieces), key=lambda p: (p.at, p.bytes))


def residents_in_slot_order(layout: Layout) -> list[Piece]:
    """All resident pieces of a rank as they lie in its slot."""
    return sorted((p for entry in layout.tensors for p in entry.resident), key=lambda p: (p.at, p.bytes))


def check_layout(layout: Layout) -> list[Piece]:
    """The pieces in file order. Raise :class:`CoverageError` unless they fit their tensors and fill the shard from
    the header's end to its last byte, without hole or overlap, and the resident pieces so fill the slot from the first
    page behind the shard to ``resident_bytes``."""
    names: set[str] = set()
    for entry in layout.tensors:
        if entry.name in names:
            raise CoverageError(f"{entry.name}: named twice in one layout")
        names.add(entry.name)
        if entry.dtype not in ITEM_BYTES:
            raise CoverageError(f"{entry.name}: unknown dtype {entry.dtype[:40]!r}")
        for piece in entry.pieces:
            check_piece(piece, entry.shape, entry.dtype, entry.name)
        for piece in entry.resident:
            check_piece(piece, entry.shape, entry.dtype, entry.name)
        if entry.resident and entry.per_rank:
            raise CoverageError(f"{entry.name}: a value of its own has no copy of another rank's")
    for alias, target in layout.aliases.items():
        if target not in names or alias in names:
            raise CoverageError(f"{alias}: an alias of {target}, which is not a tensor of this layout")
    pieces = pieces_in_file_order(layout)
    end = _end_of_dense(pieces, layout.header_bytes, "shard")
    if end != layout.shard_bytes:
        raise CoverageError(f"shard of {layout.shard_bytes} bytes is described up to byte {end}")
    residents = residents_in_slot_order(layout)
    end = _end_of_dense(residents, resident_start(layout), "slot behind the shard") if residents else 0
    if end != layout.resident_bytes:
        raise CoverageError(f"resident pieces up to byte {layout.resident_bytes} are described up to byte {end}")
    return pieces


def resident_start(layout: Layout) -> int:
    """Where the resident pieces start in the slot: on the first page behind the shard."""
    return -(-layout.shard_bytes // PAGE_BYTES) * PAGE_BYTES


def held_bytes(layout: Layout) -> int:
    """Where the snapshot's bytes end in the slot; its record lies on the next page."""
    return layout.resident_bytes or layout.shard_bytes


def _end_of_dense(pieces: Sequence[Piece], start: int, where: str) -> int:
    position = start
    for piece in pieces:
        if piece.at != position:
            raise CoverageError(
                f"hole or overlap in the {where} at byte {position}: the next piece starts at {piece.at}"
            )
        position += piece.bytes
    return position
