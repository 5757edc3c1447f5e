"""Breakdown of a machine's energy by part, with power, money and CO2, on simulated devices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.energy_bench import NOWHERE, window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.fake_powercap import make_powercap, spend_uj
from tests.support.fake_trainer import FakeTrainer
from zeus_plugins.cli import main
from zeus_plugins.energy import (
    EpochMeter,
    EstimateMonitor,
    Measurement,
    NvmlMonitor,
    NvmlPowerMonitor,
    ReplayMonitor,
)
from zeus_plugins.energy.meter import Breakdown
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.energy_run import EnergyRun

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H200")


class Machine:
    """Two GPUs, the second of which lags, and two CPU packages with memory."""

    def __init__(self, root: Path, number: int = 2) -> None:
        self.clock = Clock()
        self.gpus = [FakeGpu(uuid=f"GPU-{place}", power_mw=100_000) for place in range(number)]
        self.nvml = FakeNvml(self.gpus)
        self.powercap = make_powercap(root)

    def breakdown(self, indices: Sequence[int] | None = None) -> Breakdown:
        return Breakdown(indices, nvml=self.nvml, powercap=self.powercap, clock=self.clock)

    def train(self) -> None:
        self.clock.now_s += 10.0
        for place, gpu in enumerate(self.gpus):
            gpu.spend(3_000_000 - 1_000_000 * place)
        for package in (0, 1):
            spend_uj(self.powercap, f"intel-rapl:{package}", 500_000_000)
            spend_uj(self.powercap, f"intel-rapl:{package}:2", 30_000_000)


OF_THE_CPU = {"cpu_energy_j": 1000.0, "dram_energy_j": 60.0}
OF_ONE_GPU = {"gpu_energy_j": 3000.0, "gpu_mean_power_w": 300.0}
OF_TWO_GPUS = {"gpu_energy_j": 5000.0, "gpu_mean_power_w": 500.0}
OF_EACH_GPU = {"gpu_0_energy_j": 3000.0, "gpu_1_energy_j": 2000.0}


@pytest.mark.parametrize(
    ("number", "indices", "told"),
    [(2, None, OF_TWO_GPUS | OF_EACH_GPU), (1, None, OF_ONE_GPU), (2, (), {})],
    ids=["each GPU alone", "one GPU has no parts", "nothing of idle GPUs"],
)
def test_breakdown_contains_gpus_cpu_and_memory(
    tmp_path: Path, number: int, indices: Sequence[int] | None, told: dict[str, float]
) -> None:
    here = Machine(tmp_path, number)
    breakdown = here.breakdown(indices)
    monitor = NvmlMonitor(nvml=here.nvml, clock=here.clock) if indices is None else EstimateMonitor(65.0)
    for _ in range(2):
        breakdown.begin()
        measured = window(monitor, here.clock, 0.0, here.train)
        assert breakdown.end(measured) == OF_THE_CPU | told


def test_unmeasurable_parts_are_left_out(tmp_path: Path) -> None:
    nothing = Breakdown(nvml=FakeNvml(broken="Driver Not Loaded"), powercap=NOWHERE)
    nothing.begin()
    assert nothing.end() == {}

    here = Machine(tmp_path)
    breakdown = here.breakdown()
    breakdown.begin()
    here.train()
    told = breakdown.end(Measurement(10.0, 5000.0, "nvml", {"gpu_0": 3000.0}))
    assert "gpu_energy_j" not in told
    assert told["gpu_0_energy_j"] == 3000.0


def test_frozen_counter_is_left_out_instead_of_estimated(tmp_path: Path) -> None:
    here = Machine(tmp_path)
    breakdown = here.breakdown()
    breakdown.begin()
    measured = window(NvmlMonitor(nvml=here.nvml, clock=here.clock), here.clock, 10.0)
    assert not {"gpu_energy_j", "cpu_energy_j", "dram_energy_j"} & breakdown.end(measured).keys()


def test_gpu_without_a_counter_is_integrated() -> None:
    clock = Clock()
    nvml = FakeNvml([FakeGpu(counter_mj=None, power_mw=100_000)])
    breakdown = Breakdown(nvml=nvml, powercap=NOWHERE, clock=clock)
    breakdown.begin()
    measured = window(NvmlPowerMonitor(nvml=nvml, clock=clock), clock, 0.5)
    assert breakdown.end(measured)["gpu_energy_j"] == pytest.approx(50.0)


def test_metrics_of_an_epoch_contain_the_parts_and_the_cost_stays_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_CO2_G_PER_KWH", "360")
    here = Machine(tmp_path, 1)
    monitor = ReplayMonitor([Measurement(10.0, 2500.0, "replay", {"gpu_0": 3000.0})] * 3, GPUS)
    breakdown = here.breakdown()
    meter = EpochMeter(monitor, breakdown=breakdown)
    meter.begin()
    here.train()
    first = meter.end_epoch()
    here.train()
    second = meter.end_epoch()
    meter.end()
    assert (first["zeus/epoch_energy_j"], second["zeus/energy_j"]) == (2500.0, 5000.0)
    assert (first["zeus/co2_g"], second["zeus/co2_g"]) == (0.25, 0.5)
    for metrics in (first, second):
        assert metrics["zeus/epoch_gpu_energy_j"] == 3000.0
        assert metrics["zeus/epoch_cpu_energy_j"] == 1000.0


class Moving(FakeNvml):
    """A driver whose counter has moved by 40 J whenever it is read, as a counter may between two readings."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802 - NVML's own name
        handle.spend(40_000)
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


def test_parts_of_an_epoch_are_those_of_its_energy(tmp_path: Path) -> None:
    clock, driver = Clock(), Moving([FakeGpu(uuid=f"GPU-{place}", power_mw=100_000) for place in range(2)])
    breakdown = Breakdown(nvml=driver, powercap=make_powercap(tmp_path), clock=clock)
    meter = EpochMeter(NvmlMonitor(nvml=driver, clock=clock), breakdown=breakdown, clock=clock)
    meter.begin()
    for parts in (1, 3):
        for _ in range(parts):
            clock.now_s += 1.0
            driver.spend(560_000, 440_000)
            if parts > 1:
                meter.state()
        told = meter.end_epoch()
        assert told["zeus/epoch_energy_j"] == told["zeus/epoch_gpu_energy_j"] > parts * 1000.0
        assert told["zeus/epoch_gpu_energy_j"] == told["zeus/epoch_gpu_0_energy_j"] + told["zeus/epoch_gpu_1_energy_j"]
        assert told["zeus/epoch_gpu_mean_power_w"] == told["zeus/epoch_energy_j"] / told["zeus/epoch_time_s"]
    meter.end()


def test_amounts_of_a_checkpoint_are_continued_at_the_present_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "3.6")
    state = {"time_s": 1.0, "energy_j": 1e6, "epoch_time_s": 0.0, "epoch_energy_j": 0.0}
    for before, after in (({}, 2.0), ({"money": 5.0, "co2_g": 7.0}, 6.0)):
        meter = EpochMeter(ReplayMonitor([Measurement(1.0, 1e6, "replay")] * 2, GPUS), state | before)
        meter.begin()
        told = meter.end_epoch()
        assert (told["zeus/money"], "zeus/co2_g" in told) == (pytest.approx(after), False)


def test_training_without_a_given_monitor_is_broken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(power_mw=100_000)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu]))
    port = FakeTrainer()
    port.gpu_indices = [0]
    run = EnergyRun()
    run.begin(port, None)
    gpu.counter_mj = 7_250_000
    metrics = run.end_epoch()
    run.close()
    assert metrics is not None
    assert (metrics["zeus/epoch_energy_j"], metrics["zeus/epoch_gpu_energy_j"]) == (250.0, 250.0)
    assert metrics["zeus/epoch_gpu_mean_power_w"] > 0


def test_command_reports_the_parts_and_the_money(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(power_mw=100_000)]))
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "0.36")
    arguments = ["energy", "--monitor", "nvml-power", "--json", "--", "sleep", "0.05"]
    assert main(arguments) == 0
    told = json.loads(capfd.readouterr().err)
    assert told["money"] == pytest.approx(told["energy_j"] * 1e-7)
    assert told["gpu_mean_power_w"] == pytest.approx(100.0, rel=0.1)
    assert main([each for each in arguments if each != "--json"]) == 0
    assert re.search(r", money [\de.-]+, gpu_energy_j [\d.]+, gpu_mean_power_w [\d.]+", capfd.readouterr().err)


def test_invalid_price_is_refused_before_the_command_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEUS_PRICE_PER_KWH", "-1")
    assert main(["energy", "--monitor", "estimate", "--power-w", "1", "--", "echo", "run"]) == 125
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "ZEUS_PRICE_PER_KWH is '-1'" in printed.err
