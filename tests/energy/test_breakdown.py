"""The energy of an epoch by part, with money and CO2, on simulated devices."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.replay import ReplayMonitor
from tests.support.reporting import warnings_in
from zeus_plugins.cli import main
from zeus_plugins.energy import (
    EpochMeter,
    Measurement,
    NvmlMonitor,
)
from zeus_plugins.protocol import GpuConfig

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")


class Moving(FakeNvml):
    """A driver with a counter that moves by 40 J at each reading, as a counter may between two readings."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802 - NVML's own name
        handle.spend(40_000)
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


def test_parts_of_an_epoch_sum_up_to_the_energy() -> None:
    gpus = [FakeGpu(uuid=f"GPU-{place}", power_mw=100_000, counter_mj=10**7 * place) for place in (1, 2)]
    clock, driver = Clock(), Moving(gpus)
    meter = EpochMeter(NvmlMonitor(nvml=driver, clock=clock), clock=clock)
    meter.begin()
    for parts in (1, 3):
        for _ in range(parts):
            clock.now_s += 1.0
            driver.spend(560_000, 440_000)
            if parts > 1:
                meter.state()
        told = meter.end_epoch()
        joules = {name: told[f"zeus/epoch_{name}_energy_j"] for name in ("gpu_0", "gpu_1")}
        assert told["zeus/epoch_energy_j"] == pytest.approx(sum(joules.values()))
        assert joules["gpu_0"] > joules["gpu_1"] > parts * 440.0
    meter.end()


def test_part_unknown_in_a_window_is_left_out_of_the_epoch() -> None:
    listed = [Measurement(1.0, 5.0, "replay", parts) for parts in ({"gpu_0": 5.0}, {}, {"gpu_0": 5.0})]
    meter = EpochMeter(ReplayMonitor(listed, GPUS))
    meter.begin()
    meter.state()
    assert "zeus/epoch_gpu_0_energy_j" not in meter.end_epoch()
    assert meter.end_epoch()["zeus/epoch_gpu_0_energy_j"] == 5.0


def test_amounts_of_a_checkpoint_are_continued_at_the_present_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "3.6")
    state = {"time_s": 1.0, "energy_j": 1e6, "epoch_time_s": 0.0, "epoch_energy_j": 0.0}
    for before, after in (({}, 2.0), ({"money": 5.0, "co2_g": 7.0}, 6.0)):
        meter = EpochMeter(ReplayMonitor([Measurement(1.0, 1e6, "replay")] * 2, GPUS), state | before)
        meter.begin()
        told = meter.end_epoch()
        assert (told["zeus/money"], "zeus/co2_g" in told) == (pytest.approx(after), False)


def test_command_reports_the_parts_and_the_money(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(counter_mj=None, power_mw=100_000)]))
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "0.36")
    arguments = ["energy", "--json", "--", "sleep", "0.05"]
    assert main(arguments) == 0
    told = json.loads(capfd.readouterr().err)
    assert told["money"] == pytest.approx(told["energy_j"] * 1e-7)
    assert told["gpu_0_energy_j"] == told["energy_j"]
    assert main([each for each in arguments if each != "--json"]) == 0
    assert re.search(r", money [\de.-]+, gpu_0_energy_j [\d.]+", capfd.readouterr().err)


def test_variable_of_the_idle_power_warns_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZEUS_IDLE_POWER_W", "100")
    for _ in range(2):
        meter = EpochMeter(ReplayMonitor([Measurement(2.0, 1000.0, "nvml")], GPUS))
        meter.begin()
        assert meter.end_epoch()["zeus/energy_j"] == 1000.0
    said = "ZEUS_IDLE_POWER_W is no longer read: unset it, and subtract its watts × time from the energy"
    assert warnings_in(caplog) == [said]


def test_invalid_price_is_refused_before_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "-1")
    assert main(["energy", "--", "echo", "run"]) == 125
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "ZEUS_PRICE_PER_KWH is '-1'" in printed.err
