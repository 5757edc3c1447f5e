"""Contract of every monitor; counters of NVIDIA's GPUs, and estimates."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.energy_bench import spent_j, window
from tests.support.fake_nvml import H200, V100, Clock, FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.fake_powercap import make_powercap
from tests.support.fake_zeus_monitor import FakeZeusMeasurement, FakeZeusMonitor
from zeus_plugins.energy import (
    EnergyMonitor,
    EnergyUnavailableError,
    EstimateMonitor,
    Measurement,
    NvmlMonitor,
    NvmlPowerMonitor,
    RaplMonitor,
    ZeusMonitorAdapter,
)
from zeus_plugins.energy.estimate import cpu_model_name
from zeus_plugins.energy.nvml import chosen_indices, visible_devices
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

MIG_ID = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
GPUS = GpuConfig(max_power=250.0, number_of_gpus=1, gpu_model=V100)


# --- Contract of every monitor --------------------------------------------------------------------------------------

MONITORS: dict[str, Callable[[], EnergyMonitor]] = {
    "nvml": lambda: NvmlMonitor(nvml=FakeNvml()),
    "nvml power": lambda: NvmlPowerMonitor(nvml=FakeNvml([FakeGpu(power_mw=100_000)])),
    "rapl": lambda: RaplMonitor(root=make_powercap(Path(tempfile.mkdtemp()))),
    "zeus": lambda: ZeusMonitorAdapter(FakeZeusMonitor(*[FakeZeusMeasurement()] * 2), GPUS),
    "estimate": lambda: EstimateMonitor(65.0),
}


@pytest.fixture(params=MONITORS)
def monitor(request: pytest.FixtureRequest) -> EnergyMonitor:
    return MONITORS[request.param]()


def test_window_begun_twice_is_refused_and_stays_open(monitor: EnergyMonitor) -> None:
    monitor.begin_window("training")

    with pytest.raises(ZeusBSOOperationOrderError, match=r"'training' is already open: end it with end_window"):
        monitor.begin_window("training")
    monitor.end_window("training")


def test_ending_an_unopened_window_names_the_open_windows(monitor: EnergyMonitor) -> None:
    monitor.begin_window("training")
    monitor.begin_window("epoch")
    with pytest.raises(ZeusBSOOperationOrderError, match=r"'eval' is open \(open windows: 'training', 'epoch'\)"):
        monitor.end_window("eval")


def test_ended_window_cannot_end_again_but_can_begin_again(monitor: EnergyMonitor) -> None:
    for _ in range(2):
        monitor.begin_window("training")
        monitor.end_window("training")
        with pytest.raises(ZeusBSOOperationOrderError, match=r"open windows: none"):
            monitor.end_window("training")


def test_unused_monitor_can_be_pickled(monitor: EnergyMonitor) -> None:
    copy: EnergyMonitor = pickle.loads(pickle.dumps(monitor))  # noqa: S301  our own bytes

    assert copy.source == monitor.source
    assert copy.gpus() == monitor.gpus()
    copy.begin_window("training")
    assert copy.end_window("training").time_s >= 0


# ---- NVML ----------------------------------------------------------------------------------------------------------


def test_energy_is_the_rise_of_millijoules_summed_over_the_gpus() -> None:
    nvml, clock = FakeNvml([FakeGpu(uuid="GPU-aaaa"), FakeGpu(uuid="GPU-bbbb")]), Clock()
    monitor = NvmlMonitor(nvml=nvml, clock=clock)
    assert window(monitor, clock, 12.5, lambda: nvml.spend(1_500, 250)) == Measurement(12.5, 1.75, "nvml")
    assert monitor.gpus() == GpuConfig(max_power=1400.0, number_of_gpus=2, gpu_model=H200)


def test_driver_is_loaded_once_at_the_first_use() -> None:
    nvml = FakeNvml()
    monitor = NvmlMonitor(nvml=nvml)
    assert nvml.calls == []

    monitor.gpus()
    monitor.begin_window("training")
    assert nvml.calls == ["nvmlInit"]


@pytest.mark.parametrize(
    ("setting", "indices", "measured"),
    [
        (None, None, [0, 1, 2]),
        (None, [2], [2]),
        ("2,0", None, [0, 2]),
        ("2,0", [0], [2]),
        ("2,0", [1], [0]),
        ("GPU-bbbb", None, [1]),
        ("GPU-cccc,GPU-aaaa", [1], [0]),
        (" 1 , 2 ", None, [1, 2]),
    ],
)
def test_gpus_visible_to_cuda_are_measured(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, indices: list[int] | None, measured: list[int]
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    nvml = FakeNvml([FakeGpu(uuid=f"GPU-{letter * 4}") for letter in "abc"])
    monitor = NvmlMonitor(indices, nvml=nvml)
    assert spent_j(monitor, lambda: nvml.spend(1_000, 10_000, 100_000)) == sum(10**index for index in measured)
    assert monitor.gpus().number_of_gpus == len(measured)


@pytest.mark.parametrize(
    ("setting", "count", "visible"),
    [
        (None, 2, (0, 1)),
        ("1", 2, (1,)),
        ("0,-1,1", 2, (0,)),
        ("1,2,0", 2, (1,)),
        ("1,NoDevFiles,0", 2, (1,)),
        ("GPU-8932f937,0", 2, ("GPU-8932f937", 0)),
        (f"{MIG_ID},0", 1, (MIG_ID, 0)),
        ("MIG-GPU-8932f937/1/2,0", 1, ("MIG-GPU-8932f937/1/2", 0)),
    ],
)
def test_cuda_visible_devices_ends_at_the_first_invalid_entry(
    setting: str | None, count: int, visible: tuple[int | str, ...]
) -> None:
    assert visible_devices(setting, count) == visible


@pytest.mark.parametrize(
    ("setting", "count", "told"),
    [(each, 2, rf"2, hidden by CUDA_VISIBLE_DEVICES='{each}'") for each in ("", "-1", "NoDevFiles", "2")]
    + [(None, 0, r"0\. To estimate")],
)
def test_hidden_gpus_are_unavailable_and_the_hiding_setting_is_shown(
    setting: str | None, count: int, told: str
) -> None:
    with pytest.raises(EnergyUnavailableError, match=f"the driver lists {told}"):
        visible_devices(setting, count)


@pytest.mark.parametrize("slices", [[1] * 7, [None, 3, 3, None, None, None, None], [None] * 7, []])
@pytest.mark.parametrize("setting", [None, "0", "MIG-GPU-0"])
def test_gpu_divided_into_slices_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, slices: list[int | None]
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)

    with pytest.raises(
        EnergyUnavailableError, match=r"GPU 0 \(NVIDIA H200\): a MIG slice shares.*unless it is the whole"
    ):
        NvmlMonitor(nvml=FakeNvml([FakeGpu(mig_mode=1, slices=slices)])).gpus()


@pytest.mark.parametrize(("setting", "mig_mode"), [(None, 1), ("0", 1), ("MIG-GPU-0", 1), ("0", 0)])
def test_undivided_gpu_in_mig_mode_is_measured_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, mig_mode: int
) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    nvml = FakeNvml([FakeGpu(mig_mode=mig_mode, slices=[7, *[None] * 6])])
    monitor = NvmlMonitor(nvml=nvml)
    assert spent_j(monitor, lambda: nvml.machine[0].spend(4_000)) == 4.0
    assert monitor.gpus().gpu_model == H200


@pytest.mark.parametrize("indices", [[], [2], [-1], [0, 0]])
def test_invalid_indices_are_refused(indices: list[int]) -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"device_indices is \[.*\]: name one or more of the 2 visible GPUs"):
        chosen_indices(indices, 2)


def mixed_machine() -> FakeNvml:
    return FakeNvml([FakeGpu(name=V100, uuid="GPU-aaaa", counter_mj=0), FakeGpu(name=H200, uuid="GPU-bbbb")])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("1", "set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("0,1", rf"\(0 → {V100}, 1 → {H200}\).* choose the GPUs of one model"),
        ("1,1", "'1,1': name each GPU once"),
        ("GPU-cc", "GPU GPU-cc cannot be opened: the driver does not list.*full UUID"),
        (MIG_ID, rf"{MIG_ID} in CUDA_VISIBLE_DEVICES.*Not Found: a MIG slice shares"),
    ],
    ids=["CUDA counts by speed", "several models", "twice", "an unknown UUID", "an unknown slice"],
)
def test_setting_without_gpus_of_a_single_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, problem: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    with pytest.raises(ZeusBSOConfigError, match=problem) as refusal:
        NvmlMonitor(nvml=mixed_machine()).gpus()
    # Only failures without a mistake of the user may be estimated.
    assert isinstance(refusal.value, EnergyUnavailableError) is (setting == MIG_ID)


@pytest.mark.parametrize(("setting", "order"), [("1", "PCI_BUS_ID"), ("GPU-bbbb", None)])
def test_single_model_of_a_mixed_machine_can_be_selected_unambiguously(
    monkeypatch: pytest.MonkeyPatch, setting: str, order: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)

    assert NvmlMonitor(nvml=mixed_machine()).gpus().gpu_model == H200


@pytest.mark.parametrize(
    ("gpu", "missing"),
    [
        (FakeGpu(name="GeForce GTX 1080", counter_mj=None), "energy counter"),
        (FakeGpu(max_power_mw=None), "power limits"),
    ],
)
def test_gpu_without_a_reading_is_named_with_the_remedy(gpu: FakeGpu, missing: str) -> None:
    with pytest.raises(EnergyUnavailableError, match=rf"GPU 1 .* gives no {missing}: Not Supported.*EstimateMonitor\("):
        NvmlMonitor([1], nvml=FakeNvml([FakeGpu(name=gpu.name), gpu])).gpus()


def test_silent_driver_is_unavailable() -> None:
    with pytest.raises(EnergyUnavailableError, match=r"does not answer: Driver/library version mismatch"):
        NvmlMonitor(nvml=FakeNvml(broken="Driver/library version mismatch")).begin_window("training")


@pytest.mark.skipif(has_nvidia_driver(), reason="this machine has an NVIDIA driver")
def test_missing_driver_with_an_installed_library_gives_the_same_error() -> None:
    with pytest.raises(
        EnergyUnavailableError, match="the NVIDIA driver does not answer: NVML Shared Library Not Found"
    ):
        NvmlMonitor().gpus()


@settings(deadline=None)
@given(rises_mj=st.lists(st.integers(min_value=0, max_value=300_000), min_size=1, max_size=20))
def test_consecutive_windows_sum_to_the_whole(rises_mj: list[int]) -> None:
    # Twenty of these take less than the second after which a frozen counter is rejected.
    part_s = 1 / 32
    nvml, clock = FakeNvml([FakeGpu(counter_mj=0)]), Clock(now_s=0.0)
    monitor = NvmlMonitor(nvml=nvml, clock=clock)
    parts = []
    monitor.begin_window("whole")
    for rise_mj in rises_mj:
        monitor.begin_window("part")
        clock.now_s += part_s
        nvml.machine[0].spend(rise_mj)
        parts.append(monitor.end_window("part"))
    whole = monitor.end_window("whole")

    assert whole.time_s == sum(part.time_s for part in parts) == part_s * len(rises_mj)
    assert whole.energy_j == pytest.approx(sum(part.energy_j for part in parts), rel=1e-12)
    assert whole.energy_j == pytest.approx(sum(rises_mj) / 1000, rel=1e-12)


# ---- Estimate ------------------------------------------------------------------------------------------------------


def test_estimate_of_gpus_is_stated_watts_times_seconds_and_labelled() -> None:
    clock = Clock()
    monitor = EstimateMonitor(62.5, device_model="Gaudi 3", clock=clock)
    assert window(monitor, clock, 4.0) == Measurement(4.0, 250.0, "estimate: 62.5 W stated")
    assert monitor.source == "estimate: 62.5 W stated"


def test_estimated_devices_are_described_as_stated_or_as_this_cpu() -> None:
    monitor = EstimateMonitor(500, number_of_devices=2, device_model="Gaudi 3")
    assert monitor.gpus() == GpuConfig(max_power=500.0, number_of_gpus=2, gpu_model="Gaudi 3")
    assert monitor.source == "estimate: 500 W stated"
    assert EstimateMonitor(65.0).gpus() == GpuConfig(max_power=65.0, number_of_gpus=1, gpu_model=cpu_model_name())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"power_w": power_w}, f"power_w is {power_w}: state the watts") for power_w in (0.0, -65.0, math.nan, math.inf)]
    + [
        ({"number_of_devices": 0}, "number_of_devices is 0"),
        ({"device_model": ""}, "device_model has 0 characters"),
        ({"device_model": "x" * 256}, "device_model has 256 characters"),
    ],
)
def test_invalid_watts_and_devices_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=named):
        EstimateMonitor(**({"power_w": 65.0} | arguments))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (
            "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Xeon(R) CPU: 2.60GHz\n\nprocessor\t: 1\n",
            "Xeon(R) CPU: 2.60GHz",
        ),
        (f"model name\t: {'x' * 300}\n", "x" * 255),
    ],
    ids=["usual", "endless"],
)
def test_cpu_is_named_as_on_linux(tmp_path: Path, content: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(content)
    assert cpu_model_name(tmp_path / "cpuinfo") == name


@pytest.mark.parametrize("content", [None, "processor\t: 0\nCPU part\t: 0xd0c\n", "model name\t:\n"])
def test_unnamed_cpu_gets_a_fallback_name(tmp_path: Path, content: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if content is not None:
        cpuinfo.write_text(content)

    assert 1 <= len(cpu_model_name(cpuinfo)) <= 255
    assert cpu_model_name(cpuinfo) == cpu_model_name(tmp_path / "absent")
