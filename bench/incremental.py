"""What it saves to leave unchanged tensors where they are: a frozen model with trained adapters, saved several times.

``python -m bench.incremental [--mebibytes N] [--folder PATH]``
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from ckptd_client import Checkpointer, Keep

LAYERS = 24
SAVES = 6


class Layer(torch.nn.Module):
    """A frozen matrix, and a trained one of rank 16 beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = torch.nn.Linear(width, 16, bias=False)
        self.up = torch.nn.Linear(16, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        total: torch.Tensor = x + self.base(x) + self.up(self.down(x))
        return total


def measure(folder: Path, width: int, *, incremental: bool) -> tuple[float, float, float, list[float]]:
    """MB stored by the first save and by each later one, all in all, and seconds to durable of the later ones."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = torch.nn.Sequential(*[Layer(width) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    seconds: list[float] = []
    with Checkpointer(
        f"file://{folder}", {"model": model, "optimizer": optimizer}, incremental=incremental, keep=Keep(last=SAVES)
    ) as ckpt:
        for step in range(1, SAVES + 1):
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            optimizer.zero_grad()
            began = time.perf_counter()
            save = ckpt.save(step)
            save.wait("durable", 300)
            seconds.append(time.perf_counter() - began)
            save.wait(timeout=300)
    sizes = [
        sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 1e6
        for checkpoint in sorted(folder.glob("checkpoints/*"))
    ]
    return sizes[0], statistics.median(sizes[1:]), sum(sizes), seconds[1:]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="of the frozen model")
    parser.add_argument("--folder", type=Path, help="where to write; else a temporary folder")
    args = parser.parse_args()
    width = round((args.mebibytes * 2**20 / 4 / LAYERS) ** 0.5 / 16) * 16
    print("| | first save, MB | each later one, MB | all of 6, MB | durable, s: median (all) |")
    print("| --- | --: | --: | --: | --: |")
    for incremental in (False, True):
        with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
            first, later, all_of_it, seconds = measure(Path(folder) / "run", width, incremental=incremental)
        each = " ".join(f"{one:.2f}" for one in sorted(seconds))
        name = "`incremental=True`" if incremental else "`incremental=False`"
        print(f"| {name} | {first:.1f} | {later:.1f} | {all_of_it:.1f} | {statistics.median(seconds):.2f} ({each}) |")


if __name__ == "__main__":
    main()
