"""AMD GPUs, simulated, because no real GPU is available here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.energy_bench import probes_of, spent_j, window
from tests.support.fake_amdsmi import MI250X, MI300X, FakeAmdGpu, FakeAmdSmi
from tests.support.fake_nvml import Clock, FakeNvml
from zeus_plugins import energy
from zeus_plugins.energy import (
    AmdSmiMonitor,
    AmdSmiPowerMonitor,
    EnergyMonitor,
    EnergyUnavailableError,
    Measurement,
)
from zeus_plugins.energy.monitor import NoGpuError
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig


def spend(gpus: Sequence[FakeAmdGpu], *steps: int) -> None:
    for gpu, rise in zip(gpus, steps, strict=False):
        assert isinstance(gpu.steps, int)
        gpu.steps += rise


@pytest.mark.parametrize("key", ["energy_accumulator", "power"], ids=["since ROCm 6.2", "before"])
def test_energy_is_steps_times_resolution_summed_over_the_gpus(key: str) -> None:
    amdsmi, clock = FakeAmdSmi([FakeAmdGpu(key=key), FakeAmdGpu(key=key)]), Clock()
    monitor = AmdSmiMonitor(amdsmi=amdsmi, clock=clock)
    measured = window(monitor, clock, 12.5, lambda: spend(amdsmi.machine, 400_000, 200_000))
    assert measured == Measurement(12.5, 9.15, "amdsmi")
    assert monitor.gpus() == GpuConfig(max_power=1500.0, number_of_gpus=2, gpu_model=MI300X)


@pytest.mark.parametrize(
    ("environment", "indices", "measured"),
    [
        ({}, None, [0, 1, 2]),
        ({}, [2], [2]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, None, [0, 2]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [0], [2]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, None, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, None, [1, 2]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, None, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-b"}, None, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,-1,0"}, None, [1]),
    ],
)
@pytest.mark.parametrize("places", [(0, 1, 2), (2, 0, 1)])
def test_gpus_visible_to_hip_are_measured(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    indices: list[int] | None,
    measured: list[int],
    places: tuple[int, int, int],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    by_hip_id = [FakeAmdGpu(hip_id=index, uuid=f"GPU-{'abc'[index]}") for index in range(3)]
    monitor = AmdSmiMonitor(indices, amdsmi=FakeAmdSmi([by_hip_id[place] for place in places]))
    spent = spent_j(monitor, lambda: spend(by_hip_id, 4_000_000, 40_000_000, 400_000_000))
    assert spent == sum(61.0 * 10**index for index in measured)
    assert monitor.gpus().number_of_gpus == len(measured)


@pytest.mark.parametrize("cap", [750_000_000, 750], ids=["microwatts", "watts"])
def test_power_cap_is_read_in_either_unit(cap: int) -> None:
    assert AmdSmiMonitor(amdsmi=FakeAmdSmi([FakeAmdGpu(max_power_uw=cap)])).gpus().max_power == 750.0


def test_hidden_gpus_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    with pytest.raises(NoGpuError, match="no AMD GPU is visible: the driver lists 1"):
        AmdSmiMonitor(amdsmi=FakeAmdSmi()).gpus()


def test_gpus_of_several_models_are_refused() -> None:
    amdsmi = FakeAmdSmi([FakeAmdGpu(), FakeAmdGpu(name=MI250X)])
    with pytest.raises(ZeusBSOConfigError, match=r"GPU 0 \(AMD Instinct MI300X\), GPU 1 \(AMD Instinct MI250X\)"):
        AmdSmiMonitor(amdsmi=amdsmi).gpus()
    assert AmdSmiMonitor([1], amdsmi=amdsmi).gpus().gpu_model == MI250X


@pytest.mark.parametrize("partition", ["SPX", "N/A", "", None])
def test_whole_gpu_is_measured_in_every_partition_mode(partition: str | None) -> None:
    amdsmi = FakeAmdSmi([FakeAmdGpu(partition=partition)])
    assert AmdSmiMonitor(amdsmi=amdsmi).gpus().number_of_gpus == 1


def cards_with_two_dies() -> FakeAmdSmi:
    """Return cards as MI250 reports: the first die counts for both, and the second stays at 0."""
    first, second = FakeAmdGpu(MI250X, max_power_uw=560_000_000), FakeAmdGpu(MI250X, steps=0, max_power_uw=0)
    return FakeAmdSmi([first, second, FakeAmdGpu(MI250X, max_power_uw=560_000_000), FakeAmdGpu(MI250X, steps=0)])


@pytest.mark.parametrize(("indices", "cards"), [([0, 1], 1), ([2, 3], 1), ([1, 0, 3, 2], 2), (None, 2)])
def test_cards_with_two_dies_are_measured_by_the_first_die(indices: list[int] | None, cards: int) -> None:
    amdsmi, clock = cards_with_two_dies(), Clock()
    monitor = AmdSmiMonitor(indices, amdsmi=amdsmi, clock=clock)
    measured = window(monitor, clock, 5.0, lambda: spend(amdsmi.machine, 1_000_000, 0, 1_000_000))
    assert measured == Measurement(5.0, 15.25 * cards, "amdsmi")
    assert monitor.gpus() == GpuConfig(max_power=560.0 * cards, number_of_gpus=2 * cards, gpu_model=MI250X)


def monitor_of(**of_gpu: Any) -> AmdSmiMonitor:
    return AmdSmiMonitor(amdsmi=FakeAmdSmi([FakeAmdGpu(**of_gpu)]))


@pytest.mark.parametrize(
    ("monitor", "cause"),
    [
        (monitor_of(steps=None), "gives no energy counter: Not Supported"),
        (monitor_of(steps="N/A"), "gives no energy counter: amdsmi answers energy_accumulator='N/A'"),
        (monitor_of(steps=0), "the energy counter of GPU 0 .* stands at 0"),
        (monitor_of(partition="CPX"), r"a part of a GPU \(compute partition CPX\)"),
        (monitor_of(max_power_uw=None), "gives no power limits"),
        (AmdSmiPowerMonitor(amdsmi=FakeAmdSmi()), r"GPU 0 \(AMD Instinct MI300X\) gives no power reading"),
    ]
    + [
        (AmdSmiMonitor(half, amdsmi=cards_with_two_dies()), "shares its energy counter with .* two dies of one card")
        for half in ([0], [1], [0, 2, 3], [1, 2])
    ],
)
def test_gpus_without_a_separate_measurement_are_unavailable(monitor: EnergyMonitor, cause: str) -> None:
    with pytest.raises(EnergyUnavailableError, match=cause):
        monitor.gpus()


def test_silent_driver_means_no_gpu() -> None:
    with pytest.raises(NoGpuError, match="the AMD driver does not answer: not loaded"):
        AmdSmiMonitor(amdsmi=FakeAmdSmi(broken="not loaded")).gpus()


# --- Counters in another unit than documented -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resolution_uj", "is_believed"), [(15.25, True), (1.6, True), (1.4, False), (150.0, True), (160.0, False)]
)
def test_counter_contradicting_the_power_reading_is_rejected(resolution_uj: float, is_believed: bool) -> None:
    gpu, clock = FakeAmdGpu(resolution_uj=resolution_uj, power_w=152.5), Clock()

    def sleep(time_s: float) -> None:
        clock.now_s += time_s
        spend([gpu], round(10_000_000 * time_s))  # 152.5 W, at 15.25 µJ per step

    monitor = AmdSmiMonitor(amdsmi=FakeAmdSmi([gpu]), clock=clock, sleep=sleep)
    if is_believed:
        assert monitor.gpus().gpu_model == MI300X
        return
    with pytest.raises(
        EnergyUnavailableError, match=r"counter of GPU 0 .* rises by .* W, and its power reading is 152 W"
    ):
        monitor.gpus()


def test_power_is_integrated_without_a_trustworthy_counter(caplog: pytest.LogCaptureFixture) -> None:
    gpu, clock = FakeAmdGpu(power_w=200.0), Clock()  # its counter does not move
    amdsmi = FakeAmdSmi([gpu])
    chosen = energy.auto(probes=probes_of(FakeNvml(broken="Driver Not Loaded"), amdsmi=amdsmi))
    assert isinstance(chosen, AmdSmiPowerMonitor)
    assert "rises by 0 W, and its power reading is 200 W: energy is integrated from power readings" in caplog.text

    monitor = AmdSmiPowerMonitor(amdsmi=amdsmi, clock=clock)
    measured = window(monitor, clock, 0.5, lambda: setattr(gpu, "power_w", 300.0))
    assert measured == Measurement(0.5, 125.0, "amdsmi power, integrated")
    assert monitor.gpus() == GpuConfig(max_power=750.0, number_of_gpus=1, gpu_model=MI300X)


def test_gpu_without_a_power_limit_uses_the_stated_watts_as_maximum() -> None:
    unlimited = FakeAmdSmi([FakeAmdGpu(max_power_uw=None)])
    probes = probes_of(FakeNvml(broken="Driver Not Loaded"), amdsmi=unlimited)
    assert energy.auto(300.0, probes=probes).gpus().max_power == 300.0


def test_output_of_the_import_does_not_reach_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so')\nraise KeyError('ROCM_PATH')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(NoGpuError, match=r"the package amdsmi cannot be imported: KeyError\('ROCM_PATH'\)"):
        AmdSmiMonitor().gpus()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "Unable to find libamd_smi.so\n")
