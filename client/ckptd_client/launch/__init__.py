"""``ckptd run``: torchrun with a memory. It starts a group of workers anew from the newest checkpoint, knows when that
is of no use, and leaves nothing of a group behind."""

from ckptd_client.launch.command import run

__all__ = ["run"]
