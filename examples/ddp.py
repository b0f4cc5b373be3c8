"""Several ranks under torchrun, on CPU or GPU, with ckptd.

    torchrun --nproc-per-node 2 -m examples.ddp URL --steps 100 --every 20

End it in whatever way, all ranks or one, and start it again: all go on at the same step, each with its own data and
random numbers. No rank waits for another while it saves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ckptd_client import Checkpointer
from ckptd_client.data import ResumableLoader
from examples.gpt import GPT, Shape, library_text
from examples.train import learning_rate_factor, open_log


def windows(context: int) -> TensorDataset:
    """Windows of the text, each with the bytes that follow."""
    text = library_text()
    length = (len(text) - 1) // context * context
    return TensorDataset(text[:length].view(-1, context), text[1 : length + 1].view(-1, context))


def endless(loader: ResumableLoader) -> Iterator[list[Tensor]]:
    """Epoch after epoch, from wherever the loader stands."""
    while True:
        yield from loader


def main(argv: Sequence[str] | None = None) -> None:
    """One rank."""
    parser = argparse.ArgumentParser(prog="examples.ddp", description="Train a small GPT on several ranks with ckptd.")
    parser.add_argument("url", help="where the run lies: file:///…, s3://bucket/prefix, or a path")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="save after every so many steps")
    parser.add_argument("--events", type=Path, help="append events to this file, one for each rank; else to stdout")
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")

    shape = Shape(layers=2, width=64)
    torch.manual_seed(1 + rank)  # each rank drops out other values; DDP gives all ranks the weights of rank 0
    model = DistributedDataParallel(GPT(shape).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    loader = ResumableLoader(windows(shape.context), 8, seed=1, rank=rank, world=world)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    log_path = args.events.with_suffix(f".{rank}.jsonl") if args.events else None
    with open_log(log_path) as log, Checkpointer(args.url, state, every_steps=args.every) as ckpt:
        start = ckpt.restore()
        log("restored", rank=rank, step=start.step, source=start.source)
        batches = endless(loader)
        for step in range(start.step + 1, args.steps + 1):
            began = time.monotonic()
            text, following = (tensor.to(device) for tensor in next(batches))
            optimizer.zero_grad()
            loss = model(text, following)
            loss.backward()
            optimizer.step()
            scheduler.step()
            log("step", rank=rank, step=step, loss=loss.item(), seconds=time.monotonic() - began)
            ckpt.step(step, loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
