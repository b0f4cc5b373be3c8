"""The training state that all subjects save: the parameters of a GPT, and what AdamW keeps for them.

In fp32, or in bf16 as large models are trained: the model's parameters in bf16, and behind them a master copy in fp32,
which AdamW steps and the model is copied from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from bench.settings import Dtype

BYTES_PER_PARAMETER = {"fp32": 12, "bf16": 14}
"""The value and two moments, fp32 each; and the value in bf16 again."""
TENSORS_PER_PARAMETER = {"fp32": 4, "bf16": 5}
"""The value, two moments, and a 0-d step count; and the value in bf16 again."""

_LAYERS = 12
_BLOCK_SHARE = 0.69
"""Of the parameters that lie in blocks, in GPT-2 small; the rest are embeddings."""
_SEED = 1


class TrainingState:
    """A model, its gradients, and an optimizer whose state exists."""

    def __init__(self, size_bytes: int, tensors: int | None, dtype: Dtype = "fp32") -> None:
        """``tensors``: so many of equal size in all; ``None``: shaped like a GPT."""
        parameters = max(size_bytes // BYTES_PER_PARAMETER[dtype], 1)
        count = None if tensors is None else max(tensors // TENSORS_PER_PARAMETER[dtype], 1)
        self.model = _gpt(parameters) if count is None else _equal(parameters, count)
        self.masters: nn.ParameterList | None = None
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.02, generator=generator)
                parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        stepped = list(self.model.parameters())
        if dtype == "bf16":
            self.masters = nn.ParameterList(_split(parameter) for parameter in stepped)
            stepped = list(self.masters)
        # Moments that still move after hundreds of steps with one gradient: every step changes every tensor.
        self.optimizer = torch.optim.AdamW(stepped, lr=1e-5, betas=(0.99, 0.999), fused=True)
        self.step()

    def step(self) -> None:
        """One of the optimizer, over the whole state."""
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        if self.masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), list(self.masters))  # pyright: ignore

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by name."""
        masters = {} if self.masters is None else {"masters": self.masters}
        return {"model": self.model, **masters, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, live, by name, always in the same order."""
        return dict(self._walk())

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = cast("Mapping[torch.Tensor, Mapping[str, torch.Tensor]]", self.optimizer.state)
        stepped = self.model.parameters() if self.masters is None else self.masters
        for (name, parameter), master in zip(self.model.named_parameters(), stepped, strict=True):
            yield f"model.{name}", parameter.detach()
            if self.masters is not None:
                yield f"masters.{name}", master.detach()
            for field, value in state[master].items():
                yield f"optimizer.{field}.{name}", value

    def state_dict(self) -> dict[str, Any]:
        """As most libraries want it: of the model and of the optimizer, live tensors inside."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Copy all tensors from another :meth:`state_dict`; a loader that merely maps a file has to read it for this,
        as for the optimizer's own method it would not."""
        tensors = {f"model.{name}": value for name, value in saved["model"].items()}
        names = [name for name, _ in self.model.named_parameters()]
        if self.masters is not None:
            tensors |= {f"masters.{name}": value for name, value in zip(names, saved["masters"].values(), strict=True)}
        for name, fields in zip(names, saved["optimizer"]["state"].values(), strict=True):
            tensors |= {f"optimizer.{field}.{name}": value for field, value in fields.items()}
        self.load_tensors(tensors)

    def load_tensors(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors from others of the same names."""
        live = self.tensors()
        with torch.no_grad():
            torch._foreach_copy_(list(live.values()), [saved[name] for name in live])  # pyright: ignore

    def take_over(self, restored: Mapping[str, torch.Tensor]) -> None:
        """As :meth:`load_tensors`, but for a loader that may have read into the live tensors, where they lie."""
        if any(restored[name].data_ptr() != tensor.data_ptr() for name, tensor in self.tensors().items()):
            self.load_tensors(restored)

    def wipe(self) -> None:
        """Overwrite every tensor, so that only a restore can bring the values back."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.fill_(-1.0)


class Replica:
    """A kept copy of a state's tensors in shared memory that was touched before: what a bare copy has to do."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        sources = state.tensors()
        sizes = [tensor.nbytes for tensor in sources.values()]
        # A multiple of 64 each, so that all are aligned for every dtype and for the copy.
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 64) * 64)
        buffer = torch.empty(-(-starts[-1] // 4096) * 4096, dtype=torch.uint8)
        buffer.share_memory_()  # type: ignore[no-untyped-call]
        buffer.fill_(0)
        self.memory = memoryview(cast(Any, buffer.numpy()))
        """All of it: begins on a page, and is whole pages long."""
        self.targets: list[torch.Tensor] = [
            buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts[:-1], sizes, sources.values(), strict=True)
        ]

    def take(self) -> None:
        """Copy the live tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self.targets, list(self._state.tensors().values()))  # pyright: ignore

    def differing(self) -> str | None:
        """The name of a live tensor that differs in any bit, or ``None``."""
        for (name, live), kept in zip(self._state.tensors().items(), self.targets, strict=True):
            bits = torch.int16 if live.itemsize == 2 else torch.int32
            if not torch.equal(live.reshape(-1).view(bits), kept.reshape(-1).view(bits)):
                return name
        return None


def _split(parameter: nn.Parameter) -> nn.Parameter:
    """Make a parameter bf16; returns the master copy, which takes the gradient along."""
    master = nn.Parameter(parameter.detach())
    master.grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.detach().bfloat16()
    return master


def _gpt(parameters: int) -> nn.Module:
    width = max(16, int((parameters * _BLOCK_SHARE / (12 * _LAYERS)) ** 0.5) // 16 * 16)
    blocks = [
        nn.ModuleDict(
            {
                "ln_1": _Part(width, width=None),
                "attn_in": _Part(3 * width, width),
                "attn_out": _Part(width, width),
                "ln_2": _Part(width, width=None),
                "mlp_in": _Part(4 * width, width),
                "mlp_out": _Part(width, 4 * width),
            }
        )
        for _ in range(_LAYERS)
    ]
    in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    rows = max((parameters - in_blocks) // width - 2, 1)
    return nn.ModuleDict(
        {"blocks": nn.ModuleList(blocks), "embedding": _Table(rows, width), "ln": _Part(width, width=None)}
    )


class _Part(nn.Module):
    """Weight and bias of one layer."""

    def __init__(self, rows: int, width: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((rows,) if width is None else (rows, width)))
        self.bias = nn.Parameter(torch.empty(rows))


class _Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


def _equal(parameters: int, count: int) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.empty(max(parameters // count, 1))) for _ in range(count))
