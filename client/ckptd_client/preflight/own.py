"""What a rank tries by itself, within a time that it cannot exceed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from ckptd.cli.preflight import Options, host_checks
from ckptd.errors import ConfigError, first_line
from ckptd.health.gpu import Gpus, open_gpus
from ckptd.health.report import Check
from ckptd_client.preflight.devices import cpu_check, driver_checks, gpu_checks

STUCK_THREAD = "ckptd-preflight-checks"


def place_on_node() -> tuple[int, int]:
    """This rank's number on its machine, and how many there are. Raises :class:`ConfigError`."""
    found: list[int] = []
    for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdigit():
            raise ConfigError(f"${name} is no number: {text!r}")
        found.append(int(text))
    return found[0], found[1]


def own_checks(
    options: Options, local_rank: int, local_world: int, *, open_gpus: Callable[[], Gpus | None] = open_gpus
) -> Iterator[Check]:
    """The first rank of a node tries the host, the store and the driver; each some GPUs and a processor."""
    gpus = None
    if local_rank == 0:
        try:
            gpus = open_gpus()
        except ImportError:
            hint = "pip install 'ckptd[gpu]'"
            yield Check(level="warning", subject="GPU driver", message="nvidia-ml-py is missing", hint=hint)
        yield from host_checks(options)
    yield cpu_check()
    for index in range(local_rank, torch.cuda.device_count(), local_world):
        yield from gpu_checks(torch.device("cuda", index), f"GPU {index}", options.gpu_memory_fraction)
    if gpus is not None:
        yield from driver_checks(gpus)  # with the XIDs of all that was done above
        gpus.close()


def bounded(work: Iterable[Check], seconds: float) -> list[Check]:
    """All checks, or those made within ``seconds`` and an error that says after which one nothing came: a call into a
    driver may never return. Its thread, :data:`STUCK_THREAD`, is then left behind."""
    found: list[Check] = []

    def collect() -> None:
        try:
            found.extend(work)
        except Exception as error:  # whatever it is, it is this machine's
            found.append(Check(level="error", subject="checks", message=first_line(error)))

    thread = threading.Thread(target=collect, name=STUCK_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    checks = list(found)
    if thread.is_alive():
        after = checks[-1].subject if checks else "the start"
        text = f"nothing came for {seconds:g} s after {after!r}"
        checks.append(Check(level="error", subject="stuck", message=text, hint="a driver, disk or store hangs"))
    return checks
