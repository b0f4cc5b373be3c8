"""A training that goes on with fewer machines, and with more again.

    torchrun --nproc-per-node 4 -m examples.elastic URL --steps 100 --every 10 --events FOLDER

or, on each of several machines that may come and go,

    ckptd run --nnodes 1:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id JOB \
        -m -- examples.elastic URL --steps 100 --every 10 --events FOLDER

The script looks at how many ranks there are and chooses its layout from that: four make a 2x2 mesh, tensor parallelism
within pairs and FSDP across them; any other number is FSDP over all; one is alone. Nothing in it knows how the
checkpoint was laid out that it goes on from: a launcher that restarts it with the ranks that are left, and with all of
them when they are back, is all that is needed for a machine to go for good.

Each rank writes a log per generation to FOLDER: its layout, where it resumed, and which samples each step was made of.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Dataset

from ckptd_client import Checkpointer
from ckptd_client.data import ResumableLoader
from examples.gpt import GPT, Shape, library_text
from examples.train import learning_rate_factor, open_log


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks share the work. Ranks of one ``data_rank`` compute on the same samples."""

    name: str
    data_rank: int = 0
    data_world: int = 1


def lay_out(model: GPT, world: int) -> Layout:
    """Shard the model over all ranks, as their number suggests."""
    if world == 1:
        return Layout("alone")
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for block in model.blocks:
            parallelize_module(block.feed_forward, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        name, data = "2x2", mesh["data"]
    else:
        name, data = f"FSDP over {world}", init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return Layout(name, data.get_local_rank(), data.size())


class Windows(Dataset[tuple[int, Tensor, Tensor]]):
    """Windows of the text: the number of each, its bytes, and the bytes that follow."""

    def __init__(self, context: int, count: int) -> None:
        self._text = library_text()[: context * count + 1]
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        start = number * self._context
        return number, self._text[start : start + self._context], self._text[start + 1 : start + self._context + 1]


def endless(loader: ResumableLoader) -> Iterator[tuple[int, list[Tensor]]]:
    """Each batch and its epoch, from wherever the loader stands."""
    while True:
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch


def digests(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of each whole parameter, and of what the optimizer keeps for it: equal if and only if every bit is, however it is
    laid out. All ranks call it, as they gather the tensors."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        for part, value in {"value": parameter, **optimizer.state[parameter]}.items():
            whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().contiguous().view(-1).view(torch.uint8).numpy()
            found[f"{name}/{part}"] = hashlib.blake2b(data, digest_size=8).hexdigest()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """One rank."""
    parser = argparse.ArgumentParser(prog="examples.elastic", description="Train on however many ranks there are.")
    parser.add_argument("url", help="where the run lies: file:///…, s3://bucket/prefix, or a path")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="save after every so many steps")
    parser.add_argument("--windows", type=int, default=4096, help="samples of an epoch")
    parser.add_argument("--events", type=Path, required=True, help="the folder for the logs")
    parser.add_argument("--digests", action="store_true", help="log digests of the whole state after each step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps, for watching")
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")

    shape = Shape(layers=2, width=32, dropout=0)  # ranks of one pair would drop out other values
    torch.manual_seed(1)  # the same weights on all ranks, before they are cut
    model = GPT(shape)
    layout = lay_out(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # some are on the mesh, some on its rows
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    data = Windows(shape.context, args.windows)
    loader = ResumableLoader(data, 4, seed=1, rank=layout.data_rank, world=layout.data_world)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with Checkpointer(args.url, state, every_steps=args.every) as ckpt:
        start = ckpt.restore()
        with open_log(args.events / f"g{start.generation:05d}.{ckpt.rank}.jsonl") as log:
            place = {"layout": layout.name, "data_rank": layout.data_rank, "pid": os.getpid()}
            log("start", step=start.step, decision=start.decision, **place)
            if args.digests and start.step:
                log("state", step=start.step, digests=digests(model, optimizer))
            batches = endless(loader)
            for step in range(start.step + 1, args.steps + 1):
                epoch, (numbers, text, following) = next(batches)
                optimizer.zero_grad()
                loss = model(text, following)
                loss.backward()
                optimizer.step()
                scheduler.step()
                log("step", step=step, epoch=epoch, samples=numbers.tolist(), loss=loss.item())
                if args.digests:
                    log("state", step=step, digests=digests(model, optimizer))
                ckpt.step(step, loss=loss)
                time.sleep(args.pause)
            log("end", step=args.steps)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
