"""A GPU with a counter that moves every 100 ms and a power reading averaged over a second, on a simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_check import Bursts, Load
from tests.support.fake_nvml import FakeGpu, FakeNvml

IDLE_W, BUSY_W = 80.0, 600.0
BURST_S = 0.2
MULTIPLICATION_S = 0.002
_GRAIN_S = 0.002


class SimulatedGpu(FakeNvml):
    """The GPU with its driver, its clock and its load.

    Attributes:
        misreads: Factor of the error of power readings.
        period_s: Seconds between updates of the counter.
        samples: The share of each period whose power the counter takes for that of the whole period.
    """

    def __init__(self, misreads: float = 1.0, period_s: float = 0.1, samples: float = 1.0, **of_gpu: Any) -> None:
        gpu = FakeGpu(uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", power_mw=0, default_mw=700_000, **of_gpu)
        gpu.enforced_mw = 700_000
        super().__init__([gpu])
        self.gpu = gpu
        self.misreads = misreads
        self.period_s = period_s
        self.now_s = 100.0
        self.phase: str | Bursts = "idle"
        self.samples = samples
        self.busy_s = 0.0
        self._energy_mj = 7_000_000.0
        self._latest_w = deque([IDLE_W] * round(1 / _GRAIN_S), maxlen=round(1 / _GRAIN_S))
        self._tell()

    def clock(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        for _ in range(max(1, round(time_s / _GRAIN_S))):
            power_w = self._power_w()
            before = int(self.now_s / self.period_s + 1e-9)
            self.busy_s += _GRAIN_S * (power_w == BUSY_W)
            if (self.now_s + _GRAIN_S / 2) % self.period_s < self.samples * self.period_s:
                self._energy_mj += 1000 * power_w * _GRAIN_S / self.samples
            self.now_s += _GRAIN_S
            self._latest_w.append(power_w)
            if int(self.now_s / self.period_s + 1e-9) > before and self.gpu.counter_mj is not None:
                self.gpu.counter_mj = round(self._energy_mj)
        self._tell()

    def _power_w(self) -> float:
        if isinstance(self.phase, Bursts):
            return IDLE_W if self.phase.rest_s(self.now_s + 1e-6) else BUSY_W
        is_busy = self.phase == "load" or (self.phase == "bursts" and self.now_s % (2 * BURST_S) < BURST_S)
        return BUSY_W if is_busy else IDLE_W

    def _tell(self) -> None:
        noise_mw = 300 * (int(self.now_s / 0.1) % 2)  # noise of a sensor
        self.gpu.power_mw = round(1000 * self.misreads * sum(self._latest_w) / len(self._latest_w)) + noise_mw

    def nvmlDeviceGetFieldValues(  # noqa: N802 - NVML's own name
        self, handle: FakeGpu, fields: Sequence[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        handle.instant_mw = round(1000 * self.misreads * self._power_w())
        return super().nvmlDeviceGetFieldValues(handle, fields)


class SimulatedLoad(Load):
    """Load of a `SimulatedGpu`."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    @contextmanager
    def running(self, phase: str | Bursts) -> Iterator[None]:
        self._gpu.phase = phase
        yield
        self._gpu.phase = "idle"

    @property
    def multiplications(self) -> int:  # type: ignore[override]  # counted by the simulated clock
        return round(self._gpu.busy_s / MULTIPLICATION_S)

    def queued(self) -> tuple[float, float]:
        return 0.01, 0.4
