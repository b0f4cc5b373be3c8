"""The GPUs of this machine as their driver sees them, through NVML. No context is made on them, no memory taken."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from ckptd.storage import Finding

Answer = TypeVar("Answer")

DRIVER = Path("/proc/driver/nvidia/gpus")
"""One folder for each GPU that the driver has found."""
EVENTS_MAX = 64
"""Taken at one look, so that a GPU that reports without end does not hold it up."""

VOLATILE_ECC = 0
UNCORRECTED = 1
XID_EVENT = 8
TEMPERATURE_GPU = 0
TIMEOUT = 10
LOST = (15, 16)
"""NVML's words for a GPU that is gone: lost, reset required."""
UNKNOWN_HERE = (2, 3, 4, 6, 13)
"""NVML's words for a question that this GPU, driver or user has no answer to."""

SLOWED = {0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of the clock reasons that are faults; a power cap and idle clocks are none."""
XIDS_OF_PROGRAMS = {13: "a kernel's exception", 31: "a memory fault", 43: "a stopped program", 45: "a program's end"}
"""Mostly faults of the program. All others are the hardware's, its driver's or its firmware's."""
XIDS_OF_HARDWARE = {
    48: "uncorrectable memory error",
    63: "memory row to be remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "firmware does not answer",
    120: "firmware error",
}


class Nvml(Protocol):
    """The functions of the module ``pynvml`` (package nvidia-ml-py) that are used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> Any: ...
    def nvmlShutdown(self) -> Any: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int: ...
    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlEventSetCreate(self) -> Any: ...
    def nvmlEventSetFree(self, eventSet: Any) -> Any: ...
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> Any: ...
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any: ...


@dataclass(slots=True)
class Gpu:
    """One GPU, and what was last read of it."""

    index: int
    uuid: str
    handle: Any
    figures: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """utilization_percent, memory_used_bytes, temperature_celsius, uncorrected_errors; ``None``: it cannot tell."""
    uncorrected: int = 0

    @property
    def place(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


class _Gone(Exception):
    """The GPU does not answer; why."""


class Gpus:
    """All GPUs of this machine. Reports each XID from here on. Belongs to one thread; its calls may block."""

    def __init__(self, nvml: Nvml) -> None:
        """Raises ``nvml.NVMLError`` where there is no driver."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._events = self._quietly(nvml.nvmlEventSetCreate)
        self.all: list[Gpu] = []
        self.mute: list[int] = []
        """Indices of those that could not even be opened."""
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self.all.append(Gpu(index, nvml.nvmlDeviceGetUUID(handle), handle))
            except nvml.NVMLError:
                self.mute.append(index)
                continue
            if self._events is not None:
                self._quietly(nvml.nvmlDeviceRegisterEvents, handle, XID_EVENT, self._events)

    def look(self) -> Iterator[tuple[str, Finding]]:
        """What is wrong now, and which XIDs there were since the last look; renews each GPU's figures."""
        for index in self.mute:
            yield f"GPU {index}", Finding("error", "lost", "the driver cannot open it", "drain the node and reboot it")
        yield from self._xids()
        for gpu in self.all:
            try:
                found = list(self._look_at(gpu))
            except _Gone as gone:
                found = [Finding("error", "lost", f"it does not answer: {gone}", "drain the node and reboot it")]
            for finding in found:
                yield gpu.place, finding

    def _look_at(self, gpu: Gpu) -> Iterator[Finding]:
        nvml, handle = self._nvml, gpu.handle
        errors = self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE_ECC)
        rows = self._ask(nvml.nvmlDeviceGetRemappedRows, handle)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        gpu.figures = {
            "utilization_percent": None if rates is None else rates.gpu,
            "memory_used_bytes": None if memory is None else memory.used,
            "temperature_celsius": self._ask(nvml.nvmlDeviceGetTemperature, handle, TEMPERATURE_GPU),
            "uncorrected_errors": errors,
        }
        if errors is not None and errors > gpu.uncorrected:
            gpu.uncorrected = errors
            text = f"{errors} uncorrected memory errors since the driver was loaded"
            yield Finding("error", "ECC", text, "reset the GPU; replace it if they come back")
        if rows is not None and rows[3]:
            yield Finding("error", "row remapping", "a broken memory row could not be remapped", "replace the GPU")
        elif rows is not None and rows[2]:
            yield Finding("warning", "row remapping", "a memory row is to be remapped", "reset the GPU when it is free")
        if slowed := [name for bit, name in SLOWED.items() if reasons & bit]:
            yield Finding("warning", "throttled", f"clocks are held down by {', '.join(slowed)}", "look at its cooling")

    def _xids(self) -> Iterator[tuple[str, Finding]]:
        if self._events is None:
            return
        for _ in range(EVENTS_MAX):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if _code(error) != TIMEOUT:
                    yield "GPUs", Finding("warning", "events", f"XIDs cannot be read: {error}")
                return
            if event.eventType == XID_EVENT:
                yield self._place_of(event.device), _xid(int(event.eventData))

    def _place_of(self, handle: Any) -> str:
        """A GPU that is lost may not even tell its UUID any more."""
        uuid = self._quietly(self._nvml.nvmlDeviceGetUUID, handle)
        return next((gpu.place for gpu in self.all if uuid == gpu.uuid or handle is gpu.handle), "an unknown GPU")

    def _ask(self, question: Callable[..., Answer], *arguments: Any) -> Answer | None:
        """``None`` where this GPU has no answer. Raises :class:`_Gone`."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            if _code(error) in UNKNOWN_HERE:
                return None
            raise _Gone(str(error)) from None

    def _quietly(self, question: Callable[..., Answer], *arguments: Any) -> Answer | None:
        with contextlib.suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None

    def close(self) -> None:
        """Let go of the driver."""
        if self._events is not None:
            self._quietly(self._nvml.nvmlEventSetFree, self._events)
        self._quietly(self._nvml.nvmlShutdown)


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def _xid(number: int) -> Finding:
    if (what := XIDS_OF_PROGRAMS.get(number)) is not None:
        return Finding("warning", f"XID {number}", f"{what}: mostly the program's fault", "look at the trainer's log")
    what = XIDS_OF_HARDWARE.get(number, "a fault of the GPU, its driver or firmware")
    return Finding("error", f"XID {number}", what, "drain the node; dmesg has more")


def open_gpus() -> Gpus | None:
    """The GPUs of this machine; ``None`` where NVML finds no driver. Raises :class:`ImportError` where there are GPUs
    and the package nvidia-ml-py is missing."""
    try:
        nvml = cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        if DRIVER.is_dir() and any(DRIVER.iterdir()):
            raise
        return None
    try:
        return Gpus(nvml)
    except nvml.NVMLError:
        return None
