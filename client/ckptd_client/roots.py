"""A root as the client uses it: with retries and limits, for the length of one visit."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from ckptd.checkpoint.processes import holder_here
from ckptd.storage import Backend, Limits, StorageOptions, open_backend, with_standard_wrappers


@dataclass(frozen=True, slots=True)
class Root:
    """Where a run lies, and how to get there. The options may hold secrets: they are not in the ``repr``."""

    url: str
    options: StorageOptions
    launch: str
    shared: bool = True
    """All ranks see the same place; else each node has a disk of its own."""

    def __repr__(self) -> str:
        return f"Root({self.url!r})"

    @property
    def holder(self) -> str:
        """This process, as others are told who holds a claim."""
        return holder_here(f"launch {self.launch}")

    @contextlib.asynccontextmanager
    async def visit(self) -> AsyncGenerator[Backend, None]:
        """The backend, closed at the end."""
        async with contextlib.aclosing(open_backend(self.url, self.options)) as bare:
            yield with_standard_wrappers(bare, Limits())


@contextlib.asynccontextmanager
async def visit_all(roots: Sequence[Root]) -> AsyncGenerator[list[Backend], None]:
    """The backends of several roots, closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(root.visit()) for root in roots]
