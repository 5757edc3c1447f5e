"""Windows of power limits with stepwise counters, and the steps before the first limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.power_limit_bench import FOUND_W, LIMITS_W, machine, profiler, train
from zeus_plugins.energy import NvmlMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import NvmlDevice, PowerLimitProfiler, ZeusCost
from zeus_plugins.power_limit.plan import Pace, Part, Window
from zeus_plugins.training.power_run import PowerLimitFindings

COUNTER_S = 0.1
WIDE_W = (700.0, 550.0, 400.0, 250.0)
IDLE_W = 90.0


class SteppingGpu:
    """GPUs with counters that move every 100 ms, at these phases, with steps that take 1.5 ms or so.

    Above 500 W each draws what the model needs, which is 500 W; below, its clock falls with the cube root of the limit.
    Between two steps it draws `IDLE_W`.
    """

    def __init__(self, step_s: float = 0.0015, phases_s: Sequence[float] = (0.0,)) -> None:
        self.clock = Clock(0.0)
        self.gpus = [FakeGpu(counter_mj=1_000, uuid=f"GPU-{place}") for place in range(len(phases_s))]
        self.gpu = self.gpus[0]
        self.nvml = FakeNvml(self.gpus)
        self.monitor = NvmlMonitor(nvml=self.nvml, clock=self.clock, sleep=lambda time_s: self._spend(time_s, IDLE_W))
        self.devices = [NvmlDevice(gpu.uuid, 0, gpu.uuid, self.nvml) for gpu in self.gpus]
        self._step_s = step_s
        self._phases_s = phases_s
        self._energy_mj = 1_000.0  # of each

    def step_of(self, limit_w: float) -> tuple[float, float]:
        """Return seconds and watts of a step under a limit."""
        power_w = min(limit_w, 500.0)
        return self._step_s * (500.0 / power_w) ** (1 / 3), power_w

    def cost_j(self, limit_w: float) -> float:
        time_s, power_w = self.step_of(limit_w)
        return time_s * (0.5 * power_w + 0.5 * 700.0)

    def train(self) -> None:
        assert self.gpu.limit_mw is not None
        self._spend(*self.step_of(self.gpu.limit_mw / 1000))

    def _spend(self, time_s: float, power_w: float) -> None:
        before_s, self.clock.now_s = self.clock.now_s, self.clock.now_s + time_s
        for gpu, phase_s in zip(self.gpus, self._phases_s, strict=True):
            moved_s = math.floor((self.clock.now_s - phase_s) / COUNTER_S + 1e-9) * COUNTER_S + phase_s
            if moved_s > before_s:
                gpu.counter_mj = round(self._energy_mj + 1000 * power_w * (moved_s - before_s))
        self._energy_mj += 1000 * power_w * time_s


def profiled(here: SteppingGpu, epochs: int, steps: int, **options: Any) -> PowerLimitProfiler:
    zeus = PowerLimitProfiler(here.devices, ZeusCost(0.5), monitor=here.monitor, **options)
    for _ in range(epochs):
        zeus.on_epoch_begin(steps)
        for _ in range(steps):
            here.train()
            zeus.on_step_end()
        zeus.on_epoch_end()
    return zeus


@pytest.mark.parametrize("phases_s", [(0.0,), (0.013, 0.08)], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize(("epochs", "steps"), [(1, 12_000), (30, 500)], ids=["long epochs", "epochs of 0.8 s"])
def test_counter_moving_ten_times_a_second_does_not_mislead(epochs: int, steps: int, phases_s: Sequence[float]) -> None:
    here = SteppingGpu(phases_s=phases_s)
    zeus = profiled(here, epochs, steps, limits_w=WIDE_W)
    assert zeus.profile is not None
    assert len(zeus.profile.samples) == len(WIDE_W)
    for sample in zeus.profile.samples:
        assert sample.time_s >= 2.0
        step_s, power_w = here.step_of(sample.limit_w)
        assert sample.energy_j / sample.time_s == pytest.approx(len(phases_s) * power_w, rel=0.003)
        assert sample.time_per_step_s == pytest.approx(step_s)
    chosen_w = zeus.chosen_limit_w
    assert chosen_w is not None
    assert here.cost_j(chosen_w) <= 1.03 * min(here.cost_j(limit_w) for limit_w in WIDE_W)
    zeus.close()


def test_window_without_a_move_of_the_counter_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SteppingGpu()
    monkeypatch.setattr(here.monitor, "begin_window_at_moves", here.monitor.begin_window)  # as of another monitor
    monkeypatch.setattr(here.monitor, "end_window_at_moves", here.monitor.end_window)
    zeus = profiled(here, 1, 3000, warmup_s=0.0, profile_s=0.0)
    assert zeus.chosen_limit_w is None
    assert "the monitor measured 0 J in " in caplog.text
    zeus.close()
    assert here.gpu.limit_mw == 700_000


def test_window_grows_at_the_pace_of_the_steps() -> None:
    too_short, long_enough, timeless = (Part(40, time_s, 1.0) for time_s in (0.06, 4.0, 0.0))
    for part in (long_enough, timeless):
        pace = Pace(Window(10, 40), 0.5, 2.0)
        assert pace.measured(part) == part
        assert pace == Pace(Window(10, 40), 0.5, 2.0)
    assert pace.measured(too_short) is None
    assert pace == Pace(Window(334, 1400), 0.5, 2.0, part=too_short)


# ---- Waiting -------------------------------------------------------------------------------------------------------


def test_first_steps_are_left_to_compilation() -> None:
    where = machine()
    zeus = profiler(where, warmup_steps=0, profile_steps=1, wait_steps=3)
    assert train(where, zeus, 2) + train(where, zeus, 5) == [FOUND_W] * 3 + list(LIMITS_W)
    zeus.close()


def test_negative_waits_are_refused() -> None:
    with pytest.raises(ZeusBSOConfigError, match="profile_s -1: none is below 0"):
        PowerLimitFindings(profile_s=-1)
