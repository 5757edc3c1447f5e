"""The energy of GPUs, CPU packages and memory together."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.energy_bench import NOWHERE, window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.fake_powercap import add_zone, make_powercap, spend_uj
from tests.support.reporting import warnings_in
from zeus_plugins.cli import main
from zeus_plugins.energy import EstimateMonitor, NvmlMonitor, NvmlPowerMonitor, RaplMonitor
from zeus_plugins.energy.auto import whole_node
from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.energy_run import EnergyTotals


def test_gpu_and_cpu_and_memory_are_added_up_and_named(tmp_path: Path) -> None:
    root, clock, gpu = make_powercap(tmp_path), Clock(), FakeGpu()
    monitor = whole_node(NvmlMonitor(nvml=FakeNvml([gpu]), clock=clock), powercap=root)
    assert monitor.source == "nvml and rapl"
    assert monitor.gpus() == GpuConfig(max_power=950.0, number_of_gpus=1, gpu_model="NVIDIA H200 with CPU and DRAM")

    def spend() -> None:
        gpu.spend(300_000)
        for package in (0, 1):
            spend_uj(root, f"intel-rapl:{package}", 50_000_000)
            spend_uj(root, f"intel-rapl:{package}:2", 5_000_000)

    measured = window(monitor, clock, 0.5, spend)
    assert (measured.time_s, measured.energy_j, measured.source) == (0.5, 410.0, "nvml and rapl")
    assert measured.parts_j == {"gpu_0": 300.0, "cpu": 100.0, "dram": 10.0}


def test_stated_power_of_a_laptop_gpu_is_not_shared_with_the_packages(tmp_path: Path) -> None:
    gpu = FakeGpu(max_power_mw=None, counter_mj=None, power_mw=40_000)
    monitor = whole_node(NvmlPowerMonitor(nvml=FakeNvml([gpu]), max_power_w=80.0), powercap=make_powercap(tmp_path))
    assert monitor.gpus().max_power == 80.0 + 250.0
    clock = Clock()
    assert window(monitor, clock, 0.0).source == "nvml power, integrated and rapl"


def test_packages_without_a_limit_have_the_stated_power_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_zone(tmp_path, "intel-rapl:0", "package-0", max_power_uw=None)
    monitor = whole_node(NvmlMonitor(nvml=FakeNvml()), 180.0, tmp_path)
    assert monitor.gpus().max_power == 700.0 + 180.0
    (warning,) = warnings_in(caplog)
    assert "package-0 (intel-rapl:0) states no power limit" in warning
    assert "180 W is taken" in warning


def test_packages_beside_gpus_are_read_before_their_counters_wrap(tmp_path: Path) -> None:
    root = make_powercap(tmp_path)
    for devices in (NvmlMonitor(nvml=FakeNvml()), NvmlPowerMonitor(nvml=FakeNvml([FakeGpu(power_mw=1)]))):
        monitor = whole_node(devices, powercap=root)
        assert isinstance(monitor, CounterMonitor)
        monitor.begin_window("training")
        assert monitor._sampler is not None
        assert monitor._sampler.interval_s <= 10.0
        monitor.end_window("training")


def test_ranks_of_the_training_are_no_foreign_processes_in_the_scope_of_the_node(tmp_path: Path) -> None:
    devices = NvmlMonitor(nvml=FakeNvml([FakeGpu(pids=[4_000_001])]))
    devices.include([4_000_001])
    monitor = whole_node(devices, powercap=make_powercap(tmp_path))
    assert window(monitor, Clock(), 0.0).source == "nvml and rapl"


def test_node_without_readable_packages_is_measured_by_its_gpus_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = NvmlMonitor(nvml=FakeNvml())
    assert whole_node(gpus, powercap=NOWHERE) is whole_node(gpus, powercap=NOWHERE) is gpus
    (warning,) = warnings_in(caplog)
    assert "energy_scope='node' measures the training devices only: no CPU package counts its energy" in warning


def test_monitor_of_the_whole_machine_is_left_alone(tmp_path: Path) -> None:
    root = make_powercap(tmp_path)
    for monitor in (RaplMonitor(root=root), EstimateMonitor(65.0)):
        assert whole_node(monitor, powercap=root) is monitor


def test_scope_of_a_callback_is_checked_when_it_is_made() -> None:
    with pytest.raises(ZeusBSOConfigError, match="energy_scope"):
        EnergyTotals(energy_scope="rack")
    with pytest.raises(ZeusBSOConfigError, match="leave out energy_monitor"):
        EnergyTotals(EstimateMonitor(65.0), energy_scope="node")


def test_command_is_measured_on_a_gpu_without_a_limit_if_its_watts_are_stated(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(max_power_mw=None, limit_mw=None)]))
    assert main(["energy", "--json", "--monitor", "nvml", "--power-w", "80", "--", "true"]) == 0
    assert json.loads(capfd.readouterr().err)["max_power"] == 80.0


@pytest.mark.parametrize(("scope", "model"), [("gpu", "NVIDIA H200"), ("node", "NVIDIA H200 with CPU and DRAM")])
def test_command_is_measured_in_the_stated_scope_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, scope: str, model: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(
        sys.modules["zeus_plugins.energy.auto"], "whole_node", partial(whole_node, powercap=make_powercap(tmp_path))
    )
    options = ["--scope", scope] if scope == "node" else []
    assert main(["energy", "--json", *options, "--", "true"]) == 0
    told = json.loads(capfd.readouterr().err)
    assert (told["energy_scope"], told["gpu_model"]) == (scope, model)
