"""Selection of a monitor for this machine."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.energy_bench import probes_of, window
from tests.support.fake_amdsmi import FakeAmdGpu, FakeAmdSmi
from tests.support.fake_nvml import H200, V100, Clock, FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.fake_powercap import make_powercap
from zeus_plugins import energy
from zeus_plugins.energy import (
    DEFAULT_ESTIMATED_POWER_W,
    AmdSmiMonitor,
    AmdSmiPowerMonitor,
    EnergyMonitor,
    EnergyUnavailableError,
    EstimateMonitor,
    JetsonMonitor,
    NvmlMonitor,
    NvmlPowerMonitor,
    RaplMonitor,
)
from zeus_plugins.energy.auto import PROBES, choose
from zeus_plugins.energy.linux import POWERCAP
from zeus_plugins.energy.monitor import Choice, MonitorRequest
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

NO_DRIVER = FakeNvml(broken="Driver Not Loaded")


def auto(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int] | None = None,
    nvml: FakeNvml | None = None,
    **others: Any,
) -> EnergyMonitor:
    return energy.auto(estimated_power_w, device_indices=device_indices, probes=probes_of(nvml, **others))


def test_counters_are_preferred_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    chosen = auto(65.0, nvml=FakeNvml())

    assert isinstance(chosen, NvmlMonitor)
    assert chosen.source == "nvml"
    assert caplog.records == []


def test_chosen_monitor_is_unused_and_can_be_pickled() -> None:
    chosen: EnergyMonitor = pickle.loads(pickle.dumps(auto(nvml=FakeNvml())))  # noqa: S301  our own bytes
    assert chosen.gpus().gpu_model == H200


def test_gpu_without_a_counter_is_measured_by_power_readings(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml([FakeGpu(name="Tesla P100", counter_mj=None, power_mw=90_000)])

    for _ in range(2):
        assert isinstance(auto(nvml=nvml), NvmlPowerMonitor)
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0 (Tesla P100) gives no energy counter: Not Supported: energy is integrated from power readings instead,"
        " which is less exact."
    ]


def test_amd_gpu_is_measured_without_an_nvidia_gpu() -> None:
    assert isinstance(auto(nvml=NO_DRIVER, amdsmi=FakeAmdSmi()), AmdSmiMonitor)
    assert isinstance(auto(nvml=FakeNvml(), amdsmi=FakeAmdSmi()), NvmlMonitor)


@pytest.mark.parametrize("indices", [None, ()])
def test_training_on_the_cpu_is_measured_by_rapl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, indices: Sequence[int] | None
) -> None:
    chosen = auto(device_indices=indices, nvml=NO_DRIVER, powercap=make_powercap(tmp_path))

    assert isinstance(chosen, RaplMonitor)
    assert chosen.gpus().max_power == 250.0
    assert caplog.records == []


@pytest.mark.parametrize(
    ("indices", "nvml", "amdsmi"),
    [
        ([0], NO_DRIVER, None),
        (None, FakeNvml([FakeGpu(mig_mode=1)]), None),
        (None, FakeNvml([FakeGpu(counter_mj=None)]), None),
        (None, FakeNvml([FakeGpu(counter_mj=None)]), FakeAmdSmi()),
        (None, NO_DRIVER, FakeAmdSmi([FakeAmdGpu(steps=None)])),
    ],
    ids=["a driver that is broken", "sliced", "no counter", "no counter, beside AMD", "AMD without a counter"],
)
def test_training_on_a_gpu_is_not_measured_by_counters_of_foreign_devices(
    tmp_path: Path, indices: Sequence[int] | None, nvml: FakeNvml, amdsmi: FakeAmdSmi | None
) -> None:
    chosen = auto(device_indices=indices, nvml=nvml, amdsmi=amdsmi, powercap=make_powercap(tmp_path))
    assert isinstance(chosen, EstimateMonitor)


def test_packages_without_a_stated_limit_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for limit in make_powercap(tmp_path).glob("*/constraint_0_max_power_uw"):
        limit.unlink()

    chosen = auto(nvml=NO_DRIVER, powercap=tmp_path)

    assert isinstance(chosen, RaplMonitor)
    assert chosen.gpus().max_power == 65.0
    assert "package-0 (intel-rapl:0) states no power limit" in caplog.text
    assert auto(170.0, nvml=NO_DRIVER, powercap=tmp_path).gpus().max_power == 170.0
    with pytest.raises(ZeusBSOConfigError, match="max_power_w is -5"):
        auto(-5.0, nvml=NO_DRIVER, powercap=tmp_path)


@pytest.mark.parametrize("power_w", [0.0, -5.0, math.nan, math.inf])
def test_invalid_maximum_power_is_refused_at_once(power_w: float) -> None:
    for kind in (RaplMonitor, JetsonMonitor, NvmlMonitor, NvmlPowerMonitor, AmdSmiMonitor, AmdSmiPowerMonitor):
        with pytest.raises(ZeusBSOConfigError, match=r"max_power_w is .*: state the watts of the devices together"):
            kind(max_power_w=power_w)


SLICED = FakeGpu(mig_mode=1, slices=[None, 3, 3, None, None, None, None])
VIRTUAL = FakeGpu(name="GRID A100-10C", counter_mj=None, max_power_mw=None)
OLD = FakeGpu(name="Tesla P100", counter_mj=None, max_power_mw=250_000)


@pytest.mark.parametrize(
    ("setting", "gpus", "max_power_w", "basis", "model"),
    [
        ("0", [SLICED], 300.0, "by power limit × 3/7 (MIG)", "NVIDIA H200 MIG 3g.18gb"),
        ("MIG-GPU-0", [SLICED], 300.0, "by power limit × 3/7 (MIG)", "NVIDIA H200 MIG 3g.18gb"),
        ("MIG-GPU-0/1/0,MIG-GPU-0/2/0", [SLICED], 600.0, "by power limit × 3/7 (MIG)", "NVIDIA H200 MIG 3g.18gb"),
        ("0", [VIRTUAL], 65.0, "assumed", "GRID A100-10C"),
        ("0,1", [OLD] * 2, 500.0, "by power limit", "Tesla P100"),
    ],
    ids=["a slice", "a slice by its name", "two slices", "a virtual GPU", "GPUs without a counter"],
)
def test_unmeasurable_gpus_are_estimated_from_the_drivers_facts(
    monkeypatch: pytest.MonkeyPatch, setting: str, gpus: list[FakeGpu], max_power_w: float, basis: str, model: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    estimate = auto(nvml=FakeNvml(gpus))
    assert estimate.source == f"estimate: {max_power_w:g} W {basis}"
    assert estimate.gpus() == GpuConfig(max_power=max_power_w, number_of_gpus=setting.count(",") + 1, gpu_model=model)
    stated = auto(99.0, nvml=FakeNvml(gpus))
    assert (stated.source, stated.gpus().max_power) == ("estimate: 99 W stated", 99.0)


def make_sensor(root: Path, *rails: tuple[str, int, int]) -> None:
    """Create a sensor as on Linux: label, millivolts and milliamperes per rail."""
    folder = root / f"hwmon{len(list(root.iterdir())) if root.exists() else 0}"
    folder.mkdir(parents=True)
    (folder / "name").write_text("ina3221\n")
    for number, (label, millivolts, milliamperes) in enumerate(rails, 1):
        (folder / f"in{number}_label").write_text(f"{label}\n")
        (folder / f"in{number}_input").write_text(f"{millivolts}\n")
        (folder / f"curr{number}_input").write_text(f"{milliamperes}\n")
    (folder / "in7_label").write_text("sum of shunt voltages\n")  # a rail without a current


ORIN = (("VDD_GPU_SOC", 20_000, 500), ("VDD_CPU_CV", 20_000, 100), ("VIN_SYS_5V0", 5_000, 600))


@pytest.mark.parametrize(
    ("rails", "power_w"),
    [(ORIN, 15.0), ((("VDD_IN", 5_000, 1_200), ("VDD_CPU_GPU_CV", 5_000, 400), ("VDD_SOC", 5_000, 200)), 6.0)],
    ids=["AGX Orin, whose rails add up", "Orin Nano, whose input counts all"],
)
@pytest.mark.parametrize("indices", [None, (0,)])
def test_jetson_is_measured_by_the_power_rails(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    indices: Sequence[int] | None,
    rails: Sequence[tuple[str, int, int]],
    power_w: float,
) -> None:
    make_sensor(tmp_path / "hwmon", *rails)
    make_sensor(tmp_path / "hwmon", ("VDDQ_VDD2_1V8AO", 5_000, 100))  # a part of VIN_SYS_5V0
    (tmp_path / "model").write_text("NVIDIA Jetson Orin\0")
    chosen = auto(60.0, device_indices=indices, nvml=NO_DRIVER, hwmon=tmp_path / "hwmon")
    assert isinstance(chosen, JetsonMonitor)
    assert chosen.gpus().max_power == 60.0
    assert "60 W is taken for the most that it draws" in caplog.text

    clock = Clock()
    monitor = JetsonMonitor(root=tmp_path / "hwmon", max_power_w=60.0, model=tmp_path / "model", clock=clock)
    assert monitor.gpus().gpu_model == "NVIDIA Jetson Orin"
    measured = window(monitor, clock, 2.0)
    assert measured.source.startswith("jetson rails, integrated")
    assert measured.energy_j == pytest.approx(2.0 * power_w)


def test_sensor_of_a_foreign_board_is_not_used(tmp_path: Path) -> None:
    make_sensor(tmp_path, ("12V", 12_000, 500), ("3V3", 3_300, 100))
    assert isinstance(auto(nvml=NO_DRIVER, hwmon=tmp_path), EstimateMonitor)


def test_unreadable_rail_is_unavailable(tmp_path: Path) -> None:
    make_sensor(tmp_path, ("VDD_IN", 5_000, 100))
    (tmp_path / "hwmon0" / "curr1_input").write_text("")
    with pytest.raises(EnergyUnavailableError, match="the power rail VDD_IN cannot be read"):
        JetsonMonitor(root=tmp_path, max_power_w=60.0).gpus()


LAPTOP = "NVIDIA GeForce RTX 4070 Laptop GPU"


@pytest.mark.parametrize(
    ("default_mw", "enforced_mw", "stated_w", "max_power_w"),
    [(80_000, 55_000, 99.0, 80.0), (None, 55_000, 99.0, 55.0), (0, None, 99.0, 99.0), (None, None, None, 65.0)],
    ids=["default limit", "limit in force", "stated", "assumed"],
)
@pytest.mark.parametrize("counter_mj", [7_000, None], ids=["counter", "power readings"])
def test_laptop_without_constraints_is_measured(
    caplog: pytest.LogCaptureFixture,
    counter_mj: int | None,
    default_mw: int | None,
    enforced_mw: int | None,
    stated_w: float | None,
    max_power_w: float,
) -> None:
    gpu = FakeGpu(name=LAPTOP, counter_mj=counter_mj, power_mw=30_000, max_power_mw=None)
    gpu.default_mw, gpu.enforced_mw = default_mw, enforced_mw

    chosen = auto(stated_w, nvml=FakeNvml([gpu]))

    assert isinstance(chosen, NvmlPowerMonitor if counter_mj is None else NvmlMonitor)
    assert chosen.gpus() == GpuConfig(max_power=max_power_w, number_of_gpus=1, gpu_model=LAPTOP)
    assert ("gives no power limits" in caplog.text) is not bool(default_mw or enforced_mw)


def test_stated_watts_cover_all_gpus_together() -> None:
    nvml = FakeNvml([FakeGpu(max_power_mw=None), FakeGpu(max_power_mw=None)])
    assert auto(500.0, nvml=nvml).gpus() == GpuConfig(max_power=500.0, number_of_gpus=2, gpu_model=H200)


def test_only_the_training_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(auto(device_indices=(), nvml=FakeNvml()), EstimateMonitor)
    assert auto(device_indices=(1,), nvml=FakeNvml([FakeGpu(), FakeGpu()])).gpus().number_of_gpus == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(auto(nvml=FakeNvml()), EstimateMonitor)


def test_gpus_of_several_models_are_an_error_despite_the_estimate() -> None:
    with pytest.raises(ZeusBSOConfigError, match="several models"):
        auto(nvml=FakeNvml([FakeGpu(name=V100, uuid="GPU-aaaa"), FakeGpu(uuid="GPU-bbbb")]))


@pytest.mark.parametrize(
    ("argument_w", "environment", "power_w"),
    [(None, None, DEFAULT_ESTIMATED_POWER_W), (None, "95.5", 95.5), (120.0, "95.5", 120.0), (120.0, "junk", 120.0)],
)
def test_watts_come_from_argument_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch, argument_w: float | None, environment: str | None, power_w: float
) -> None:
    if environment is not None:
        monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", environment)

    assert auto(argument_w, nvml=FakeNvml([])).gpus().max_power == power_w


@pytest.mark.parametrize("text", ["", "65W", "0", "-5", "nan", "inf"])
def test_malformed_variable_is_named_with_the_value(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", text)

    with pytest.raises(ZeusBSOConfigError, match=f"environment variable ZEUS_ESTIMATED_POWER_W is '{text}'"):
        auto(nvml=FakeNvml([]))


def test_malformed_watts_cause_no_warning_of_an_estimate(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeusBSOConfigError, match="power_w is -1"):
        auto(-1.0, nvml=FakeNvml([]))
    assert caplog.records == []


def test_estimate_is_warned_of_once_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        auto(61.0, nvml=FakeNvml(broken="Driver Not Loaded"))
        auto(61.0, nvml=FakeNvml([]))

    assert [(record.name, record.levelname) for record in caplog.records] == [("zeus_plugins.energy", "WARNING")] * 2
    assert caplog.records[0].getMessage() == (
        "No energy counter found (the NVIDIA driver does not answer: Driver Not Loaded; no CPU package counts its"
        " energy in /nowhere (RAPL)): energy is estimated as 61 W × CPU time / cores, not measured."
    )
    assert "no GPU is visible" in caplog.records[1].getMessage()


def test_missing_watts_are_requested() -> None:
    warning = choose(probes=probes_of(FakeNvml([]))).warning or ""
    assert warning.endswith(
        "65 W × CPU time / cores, not measured. State the watts that the whole machine draws at full load by the"
        " environment variable ZEUS_ESTIMATED_POWER_W or by energy_monitor=EstimateMonitor(power_w=...)."
    )


@pytest.mark.skipif(has_nvidia_driver() or POWERCAP.exists(), reason="this machine measures energy")
def test_new_counter_is_an_entry_in_the_list_of_probes() -> None:
    mine = EstimateMonitor(1.0, basis="told by my meter")

    def probe(request: MonitorRequest) -> Choice:
        return request.choice(lambda **_: mine)

    assert energy.auto().source.startswith("estimate: 65 W assumed")
    assert energy.auto(probes=[probe, *PROBES]) is mine
