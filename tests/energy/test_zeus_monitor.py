"""Monitors with the interface of Zeus's."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_nvml import H200, FakeGpu, FakeNvml
from tests.support.fake_zeus_monitor import FakeZeusMeasurement, FakeZeusMonitor
from tests.support.servers import ServerProcess
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import (
    EstimateMonitor,
    Measurement,
    ZeusMonitorAdapter,
    as_energy_monitor,
    zeus_monitor,
)
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

GPUS = GpuConfig(max_power=500.0, number_of_gpus=2, gpu_model=H200)


def measured(answer: object) -> Measurement:
    adapter = ZeusMonitorAdapter(FakeZeusMonitor(answer), GPUS)
    adapter.begin_window("training")
    return adapter.end_window("training")


@pytest.mark.parametrize(
    ("answer", "energy_j"),
    [
        (FakeZeusMeasurement(), 42.5),
        (SimpleNamespace(time=2.0, total_energy=7), 7.0),
        (SimpleNamespace(time=2.0, gpu_energy={0: 1.5, 3: 2}), 3.5),
        (FakeZeusMeasurement(gpu_energy={0: 8.0}, cpu_energy={0: 5.0}), 8.0),
        (FakeZeusMeasurement(gpu_energy={}, cpu_energy={0: 5.0, 1: 6.0}, dram_energy={0: 0.5}), 11.5),
        (FakeZeusMeasurement(gpu_energy={}, cpu_energy={0: 5.0}), 5.0),
    ],
)
def test_seconds_and_joules_are_adopted(answer: object, energy_j: float) -> None:
    assert measured(answer) == Measurement(2.0, energy_j, "FakeZeusMonitor")


@pytest.mark.parametrize("energy_j", [0.0, float("nan"), float("inf"), -3.0, 4_300_000.0])
def test_impossible_joules_are_estimated_and_reported(energy_j: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zeus_plugins.energy"):
        answer = measured(SimpleNamespace(time=2.0, total_energy=energy_j))
    source = f"FakeZeusMonitor, but estimate: 500 W, for it measured {energy_j:g} J"
    assert answer == Measurement(2.0, 1000.0, source)
    assert source in caplog.text


def test_window_below_a_second_may_cost_nothing() -> None:
    assert measured(FakeZeusMeasurement(time=0.9, gpu_energy={0: 0.0})) == Measurement(0.9, 0.0, "FakeZeusMonitor")


@pytest.mark.parametrize(
    "answer",
    [None, 3.0, SimpleNamespace(time=1.0), SimpleNamespace(total_energy=1.0), {"time": 1.0, "total_energy": 1}],
)
def test_answer_without_time_or_energy_is_refused(answer: object) -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"FakeZeusMonitor.end_window returned .*it has to have the seconds"):
        measured(answer)


@pytest.mark.parametrize(
    ("soc", "energy_j"),
    [
        (SimpleNamespace(cpu_energy_mj=4_000, gpu_energy_mj=5_000, total_energy_mj=12_000), 12.0),
        (
            SimpleNamespace(
                cpu_total_mj=3_000, efficiency_cores_mj=[1_000], dram_mj=500, gpu_mj=6_000, gpu_sram_mj=None, ane_mj=0
            ),
            9.5,
        ),
    ],
    ids=["Jetson", "Apple"],
)
def test_system_on_a_chip_counts_as_a_whole_and_each_part_once(soc: object, energy_j: float) -> None:
    answer = SimpleNamespace(
        time=2.0, gpu_energy={}, cpu_energy=None, dram_energy=None, soc_energy=soc, total_energy=0.0
    )
    assert measured(answer).energy_j == energy_j


@pytest.mark.parametrize(("indices", "number"), [([0], 1), ([1, 2], 2)])
def test_nvml_describes_the_monitored_gpus_by_default(indices: list[int], number: int) -> None:
    nvml = FakeNvml([FakeGpu(uuid=f"GPU-{letter}") for letter in "abc"])
    described = ZeusMonitorAdapter(FakeZeusMonitor(gpu_indices=indices), nvml=nvml).gpus()
    assert described == GpuConfig(max_power=700.0 * number, number_of_gpus=number, gpu_model=H200)


@pytest.mark.parametrize(
    ("indices", "nvml", "why"),
    [([], FakeNvml(), ""), ([0], FakeNvml(broken="not loaded"), r"\(the NVIDIA driver ")],
    ids=["a monitor of the CPU beside GPUs", "NVML cannot describe them"],
)
def test_gpus_must_be_given(indices: list[int], nvml: FakeNvml, why: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=rf"which devices .* NVML cannot say {why}.*gpus=GpuConfig"):
        ZeusMonitorAdapter(FakeZeusMonitor(gpu_indices=indices), nvml=nvml).gpus()


class AmdGpus:
    """Zeus's `AMDGPUs` on a machine with GPUs of these models."""

    def __init__(self, *models: str) -> None:
        self.models = models

    def get_name(self, index: int) -> str:
        return self.models[index]

    def get_power_management_limit_constraints(self, index: int) -> tuple[int, int]:
        del index
        return 0, 750_000


NO_DRIVER = FakeNvml(broken="not loaded")


def test_zeus_describes_amd_gpus() -> None:
    monitor = FakeZeusMonitor(gpu_indices=[0, 1])
    monitor.gpus = AmdGpus("AMD Instinct MI300X", "AMD Instinct MI300X")
    described = ZeusMonitorAdapter(monitor, nvml=NO_DRIVER).gpus()
    assert described == GpuConfig(max_power=1500.0, number_of_gpus=2, gpu_model="AMD Instinct MI300X")
    monitor.gpus = AmdGpus("AMD Instinct MI300X", "AMD Instinct MI250X")
    with pytest.raises(ZeusBSOConfigError, match="several models"):
        ZeusMonitorAdapter(monitor, nvml=NO_DRIVER).gpus()


@pytest.mark.parametrize(("variable", "power_w"), [("60", 60.0), (None, 65.0)])
def test_system_on_a_chip_is_described_by_the_board_and_the_stated_watts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str | None, power_w: float
) -> None:
    if variable is not None:
        monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", variable)
    monkeypatch.setattr(zeus_monitor, "board_model", lambda: "NVIDIA Jetson Orin Nano")
    monitor = FakeZeusMonitor(gpu_indices=[])
    monitor.soc_is_present = True
    described = ZeusMonitorAdapter(monitor, nvml=NO_DRIVER).gpus()
    assert described == GpuConfig(max_power=power_w, number_of_gpus=1, gpu_model="NVIDIA Jetson Orin Nano")
    assert ("65 W is taken for the most that it draws" in caplog.text) is (variable is None)


def test_window_refused_by_the_monitor_is_not_open() -> None:
    monitor = FakeZeusMonitor()
    monitor.open.add("training")
    adapter = ZeusMonitorAdapter(monitor, GPUS)
    with pytest.raises(ValueError, match="training"):
        adapter.begin_window("training")
    with pytest.raises(ZeusBSOOperationOrderError, match="open windows: none"):
        adapter.end_window("training")


# ---- Recognition ---------------------------------------------------------------------------------------------------


def test_zeus_monitor_is_adapted_and_own_monitors_stay_unchanged() -> None:
    assert isinstance(as_energy_monitor(FakeZeusMonitor()), ZeusMonitorAdapter)
    monitor = EstimateMonitor(50.0)
    assert as_energy_monitor(monitor) is monitor
    adapter = ZeusMonitorAdapter(FakeZeusMonitor(), GPUS)
    assert as_energy_monitor(adapter) is adapter
    assert adapter.gpus() is GPUS


@pytest.mark.parametrize("thing", ["val_acc", None, SimpleNamespace(begin_window=print)])
def test_object_without_a_monitor_interface_is_refused(thing: Any) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"{type(thing).__name__} is no energy monitor"):
        as_energy_monitor(thing)


def test_training_accepts_a_monitor_in_the_style_of_zeus(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    job = JobSpec(
        job_id="zeus", job_id_prefix="zeus", batch_sizes=(8,), default_batch_size=8, max_epochs=2, target_metric=0.9
    )
    monitor = FakeZeusMonitor(*[FakeZeusMeasurement()] * 3)
    with BatchSizeOptimizer(monitor, server.url, job) as optimizer, BsoClient(server.url) as client:
        optimizer.get_batch_size()
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.95)
        (trial,) = client.show_job("zeus").trials
    assert (trial.time_s, trial.energy_j, trial.energy_source) == (2.0, 42.5, "FakeZeusMonitor")
