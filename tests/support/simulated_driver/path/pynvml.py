"""An NVIDIA driver that is not there, for processes with this folder on their path: one GPU, by the machine's clock.

Its counter says that it has always drawn `POWER_W`, in all processes alike, and moves every 20 ms. A process computes
on it if it has loaded PyTorch and has read the counter: a file in the folder that ``SIMULATED_GPU`` names has its pid
as its name.
"""
# ruff: noqa: N802 - the names are NVIDIA's

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.support.fake_nvml import FakeGpu, FakeNvml, FakeNvmlError
from tests.support.simulated_driver import MAX_POWER_W, NAME, PERIOD_S, POWER_W

NVMLError = FakeNvmlError


class _Driver(FakeNvml):
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:
        if "torch" in sys.modules:
            (_computing() / str(os.getpid())).touch()
        handle.counter_mj = round(1000 * POWER_W * PERIOD_S * (time.monotonic() // PERIOD_S))
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[object]:
        handle.pids = [int(file.name) for file in _computing().iterdir() if _lives(int(file.name))]
        return super().nvmlDeviceGetComputeRunningProcesses(handle)  # type: ignore[return-value]


def _computing() -> Path:
    folder = Path(os.environ["SIMULATED_GPU"])
    folder.mkdir(exist_ok=True)
    return folder


def _lives(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


_milliwatts = round(1000 * POWER_W), round(1000 * MAX_POWER_W)
_driver = _Driver(
    [
        FakeGpu(
            name=NAME,
            uuid="GPU-5135a1a7-ed00-4000-8000-000000000000",
            power_mw=_milliwatts[0],
            max_power_mw=_milliwatts[1],
            limit_mw=_milliwatts[1],
            default_mw=_milliwatts[1],
            enforced_mw=_milliwatts[1],
        )
    ]
)
globals().update({name: getattr(_driver, name) for name in dir(_driver) if name.startswith("nvml")})
