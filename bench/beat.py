"""``python -m bench.beat``: what it costs a training step to be watched, and logged."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptd.pulse import Phase, Pulse
from ckptd_client.progress import Progress

TURNS = 200
CALLS = 2000


def each_microseconds(call: Callable[[int], None]) -> list[float]:
    """Of CPU for one call, in each of many turns, sorted: others that use the machine do not count."""
    found: list[float] = []
    for _ in range(TURNS):
        began = time.thread_time()
        for number in range(CALLS):
            call(number)
        found.append((time.thread_time() - began) / CALLS * 1e6)
    return sorted(found)


def main() -> None:
    """Best, middle and worst turn."""
    pulse = Pulse()

    def step(number: int) -> None:
        pulse.step(number, loss=1.5, grad_norm=0.5)

    def phase(_: int) -> None:
        with pulse.phase(Phase.EVAL):
            pass

    progress = Progress(pulse)
    metrics = {f"metric {number}": 1.5 for number in range(6)}

    def logged(number: int) -> None:
        progress.step(number, {"loss": 1.5, "grad_norm": 0.5, "tokens": number}, due=False)

    def logged_much(number: int) -> None:
        progress.step(number, {"loss": 1.5, "grad_norm": 0.5, **metrics}, due=False)

    for name, call in (
        ("step", step),
        ("step, with a row of 3", logged),
        ("step, with a row of 8", logged_much),
        ("phase, begin and end", phase),
    ):
        turns = each_microseconds(call)
        print(f"{name}: best {turns[0]:.2f} µs, median {turns[TURNS // 2]:.2f} µs, worst {turns[-1]:.2f} µs")
    pulse.close()


if __name__ == "__main__":
    main()
