"""An NVML that says what was recorded: a module's worth of functions, at one moment of a recording after the other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDINGS = Path(__file__).parent / "recordings"
XID_EVENT = 8


class NVMLError(Exception):
    """With NVML's number for what is wrong."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class ReplayedNvml:
    """Each look at the GPUs ends by reading all events there are; so do moments here, by :meth:`advance`.

    A recording is a list of moments; each holds, by UUID, what the functions answer (``{"error": n}``: it fails with
    n), and the XIDs that came since the moment before.
    """

    NVMLError = NVMLError

    def __init__(self, name: str) -> None:
        self._moments = json.loads((RECORDINGS / f"{name}.json").read_text())
        self._now = 0
        self._events = self._xids()
        self.registered: set[str] = set()
        self.open = False

    def advance(self) -> None:
        """To the next moment; the last one stays."""
        self._now = min(self._now + 1, len(self._moments) - 1)
        self._events = self._xids()

    def _xids(self) -> list[tuple[str, int]]:
        return [(uuid, number) for uuid, number in self._moments[self._now].get("xids", ())]

    def _gpu(self, uuid: str, name: str) -> Any:
        answer = self._moments[self._now]["gpus"][uuid].get(name, {"error": 3})
        if isinstance(answer, dict) and "error" in answer:
            raise NVMLError(answer["error"])
        return answer

    def nvmlInit(self) -> None:
        if "gpus" not in self._moments[0]:
            raise NVMLError(12)
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self._moments[0]["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        uuid = list(self._moments[0]["gpus"])[index]
        self._gpu(uuid, "handle")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetTotalEccErrors(self, handle: str, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        return int(self._gpu(handle, "ecc"))

    def nvmlDeviceGetRemappedRows(self, device: str) -> tuple[int, int, int, int]:
        corrected, uncorrected, pending, failed = self._gpu(device, "rows")
        return corrected, uncorrected, pending, failed

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return int(self._gpu(handle, "reasons"))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self._gpu(handle, "utilization"))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=self._gpu(handle, "memory_used"))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == 0
        return int(self._gpu(handle, "temperature"))

    def nvmlEventSetCreate(self) -> object:
        return self

    def nvmlEventSetFree(self, eventSet: object) -> None:
        assert eventSet is self

    def nvmlDeviceRegisterEvents(self, handle: str, eventTypes: int, eventSet: object) -> None:
        assert eventTypes == XID_EVENT
        self.registered.add(handle)

    def nvmlEventSetWait_v2(self, eventSet: object, timeoutms: int) -> Any:
        while self._events:
            uuid, number = self._events.pop(0)
            if uuid in self.registered:
                return SimpleNamespace(eventType=XID_EVENT, eventData=number, device=uuid)
        raise NVMLError(10)
