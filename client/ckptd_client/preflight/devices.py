"""Processors and GPUs: known answers, patterns in memory, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ckptd.health.gpu import Gpus
from ckptd.health.report import HOST, Check
from ckptd.limits import GIB, MIB

CPU_SIDE = 384
GPU_SIDE = 8192
REPEATS = 3
GPU_REPEATS = 16
VALUE_MAX = 8
"""Factors are whole numbers up to this: sums of products stay below 2**24 and so are exact in float32, in whichever
order, and on tensor cores, which round the factors."""
COPY_BYTES = 256 * MIB
PATTERNS = (0x55, 0xAA, 0x00, 0xFF)
CHUNK_BYTES = GIB
WRONG_HINT = "it computes wrongly: leave the node out, and test its processor and memory"


def cpu_check() -> Check:
    """A product of matrices on the processors."""
    right, flops = _products(torch.device("cpu"), CPU_SIDE, REPEATS)
    if not right:
        return Check(level="error", subject="CPU matmul", message="a known product came out wrong", hint=WRONG_HINT)
    return Check(
        level="ok",
        subject="CPU matmul",
        message=f"right, {flops / 1e9:.1f} GFLOP/s",
        figures={"flops_per_second": flops},
    )


def gpu_checks(device: torch.device, place: str, memory_fraction: float) -> Iterator[Check]:
    """One GPU: products, patterns in ``memory_fraction`` of its free memory, the way to the host and back. What the
    GPU or its driver cannot do at all is an error among them."""
    for check in (_gpu_product, _gpu_memory, _gpu_copies):
        try:
            yield check(device, place, memory_fraction)
        except RuntimeError as error:  # CUDA's errors, out of memory among them
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            yield Check(level="error", subject=f"GPU{check.__name__.replace('_gpu_', ' ')}", message=text, place=place)


def _gpu_product(device: torch.device, place: str, _: float) -> Check:
    right, flops = _products(device, GPU_SIDE, GPU_REPEATS)
    if not right:
        text = "a known product came out wrong"
        return Check(level="error", subject="GPU matmul", message=text, hint=WRONG_HINT, place=place)
    figures = {"flops_per_second": flops}
    text = f"right, {flops / 1e12:.1f} TFLOP/s"
    return Check(level="ok", subject="GPU matmul", message=text, figures=figures, place=place)


def _products(device: torch.device, side: int, repeats: int) -> tuple[bool, float]:
    """Whether all products of the same two matrices are right, and the best rate.

    The answer is known by associativity: (AB)x = A(Bx), in whole numbers, computed here in float64. A wrong element of
    AB stays hidden only where the random x happens to cancel it.
    """
    generator = torch.Generator().manual_seed(side)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-VALUE_MAX, VALUE_MAX + 1, shape, generator=generator)

    a, b, x = whole(side, side).float(), whole(side, side).float(), whole(side, 1).double()
    expected = a.double() @ (b.double() @ x)
    on_a, on_b = a.to(device), b.to(device)
    best = 0.0
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        product = on_a @ on_b
        _wait(device)
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
        if not torch.equal(product.cpu().double() @ x, expected):
            return False, best
    return True, best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_memory(device: torch.device, place: str, fraction: float) -> Check:
    free, _ = torch.cuda.mem_get_info(device)
    count = max(int(free * fraction) // CHUNK_BYTES, 1)
    chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(count)]
    wrong = 0
    for pattern in PATTERNS:
        for number, chunk in enumerate(chunks):
            chunk.fill_(pattern ^ (number & 1))  # neighbours differ: an address line that sticks shows
        wrong += sum(int((chunk != (pattern ^ (number & 1))).sum().item()) for number, chunk in enumerate(chunks))
    del chunks
    torch.cuda.empty_cache()
    text = f"{count * CHUNK_BYTES / GIB:.0f} GiB filled with {len(PATTERNS)} patterns"
    if wrong:
        text = f"{wrong} bytes came back wrong; {text}"
        return Check(level="error", subject="GPU memory", message=text, hint="replace the GPU", place=place)
    return Check(level="ok", subject="GPU memory", message=text, place=place)


def _gpu_copies(device: torch.device, place: str, _: float) -> Check:
    there = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        here.copy_(there, non_blocking=True)
        _wait(device)
        best = max(best, COPY_BYTES / (time.perf_counter() - began))
    if not torch.equal(here.to(device), there):
        text = "bytes changed on the way to the host and back"
        return Check(level="error", subject="GPU to host", message=text, hint="replace GPU or riser", place=place)
    text, figures = f"{best / 1e9:.1f} GB/s to pinned memory", {"copy_bytes_per_second": best}
    return Check(level="ok", subject="GPU to host", message=text, figures=figures, place=place)


def driver_checks(gpus: Gpus) -> Iterator[Check]:
    """What the driver says of all GPUs of this machine."""
    found = list(gpus.look())
    for place, finding in found:
        yield Check(
            level=finding.level, subject=finding.subject, message=finding.message, hint=finding.hint, place=place
        )
    if not found:
        yield Check(level="ok", subject="GPU driver", message=f"nothing wrong with {len(gpus.all)} GPUs", place=HOST)
