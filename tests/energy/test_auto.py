"""Selection of a monitor for this machine."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.energy_bench import probes_of
from tests.support.fake_nvml import H200, V100, FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.fake_powercap import make_powercap
from zeus_plugins import energy
from zeus_plugins.energy import (
    DEFAULT_ESTIMATED_POWER_W,
    EnergyMonitor,
    EstimateMonitor,
    NvmlMonitor,
    NvmlPowerMonitor,
    RaplMonitor,
)
from zeus_plugins.energy.auto import PROBES, choose
from zeus_plugins.energy.estimate import board_model, cpu_model_name
from zeus_plugins.energy.monitor import Choice, MonitorRequest
from zeus_plugins.energy.rapl import POWERCAP
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


@pytest.mark.parametrize("indices", [None, ()])
def test_training_on_the_cpu_is_measured_by_rapl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, indices: Sequence[int] | None
) -> None:
    chosen = auto(device_indices=indices, nvml=NO_DRIVER, powercap=make_powercap(tmp_path))

    assert isinstance(chosen, RaplMonitor)
    assert chosen.gpus().max_power == 250.0
    assert caplog.records == []


@pytest.mark.parametrize(
    ("indices", "nvml"),
    [
        ([0], NO_DRIVER),
        (None, FakeNvml([FakeGpu(mig_mode=1)])),
        (None, FakeNvml([FakeGpu(counter_mj=None)])),
    ],
    ids=["a driver that is broken", "sliced", "no counter"],
)
def test_training_on_a_gpu_is_not_measured_by_counters_of_foreign_devices(
    tmp_path: Path, indices: Sequence[int] | None, nvml: FakeNvml
) -> None:
    chosen = auto(device_indices=indices, nvml=nvml, powercap=make_powercap(tmp_path))
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
    for kind in (RaplMonitor, NvmlMonitor, NvmlPowerMonitor):
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


@pytest.mark.parametrize("indices", [None, (0,)])
def test_amd_gpus_are_estimated_and_the_warning_names_the_monitor_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, indices: Sequence[int] | None
) -> None:
    (tmp_path / "kfd").touch()
    root = make_powercap(tmp_path / "powercap")
    rocm = SimpleNamespace(version=SimpleNamespace(hip="6.4"), cuda=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", rocm)

    chosen = auto(device_indices=indices, nvml=NO_DRIVER, kfd=tmp_path / "kfd", powercap=root)

    assert chosen.source == "estimate: 65 W assumed"
    (record,) = caplog.records
    assert "does not read the energy of AMD GPUs, but the ZeusMonitor of the package zeus" in record.getMessage()
    assert "pass energy_monitor=ZeusMonitor()" in record.getMessage()
    assert isinstance(auto(device_indices=(), nvml=NO_DRIVER, kfd=tmp_path / "kfd", powercap=root), RaplMonitor)
    assert isinstance(auto(nvml=FakeNvml(), kfd=tmp_path / "kfd"), NvmlMonitor)


@pytest.mark.parametrize(
    ("version", "has_driver", "kind"),
    [("2.8.0+rocm6.4", True, EstimateMonitor), ("2.8.0+rocm6.4", False, RaplMonitor), ("2.8.0+cpu", True, RaplMonitor)],
    ids=["AMD GPU", "no AMD GPU", "PyTorch for the CPU"],
)
def test_amd_gpu_counts_where_pytorch_is_installed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, has_driver: bool, kind: type[EnergyMonitor]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    kfd = tmp_path / "kfd"
    if has_driver:
        kfd.touch()
    assert isinstance(auto(nvml=NO_DRIVER, kfd=kfd, powercap=make_powercap(tmp_path / "powercap")), kind)


@pytest.mark.parametrize("indices", [None, (0,), ()])
def test_jetson_is_estimated_and_the_warning_names_the_monitor_that_reads_it(
    caplog: pytest.LogCaptureFixture, indices: Sequence[int] | None
) -> None:
    chosen = auto(60.0, device_indices=indices, nvml=NO_DRIVER, board="NVIDIA Jetson AGX Orin")
    assert chosen.source.startswith("estimate: 60 W stated")
    causes = choose(60.0, device_indices=indices, probes=probes_of(NO_DRIVER, board="NVIDIA Jetson AGX Orin")).causes
    # A training on the CPU leaves the GPU's monitor to the doctor.
    told = "; ".join(causes) if indices == () else caplog.text
    assert "does not read the energy of the NVIDIA Jetson AGX Orin, but the ZeusMonitor" in told
    assert chosen.gpus().gpu_model == ("NVIDIA Jetson AGX Orin" if indices != () else cpu_model_name())


def test_model_of_a_board_is_read_from_the_device_tree(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("NVIDIA Jetson Orin Nano\0")
    assert board_model(tmp_path / "model") == "NVIDIA Jetson Orin Nano"
    assert board_model(tmp_path / "absent") == ""


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


@pytest.mark.parametrize("text", ["65W", "0", "-5", "nan", "inf"])
def test_malformed_variable_is_named_with_the_value(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", text)

    with pytest.raises(ZeusBSOConfigError, match=f"environment variable ZEUS_ESTIMATED_POWER_W is '{text}'"):
        auto(nvml=FakeNvml([]))


def test_malformed_watts_cause_no_warning_of_an_estimate(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeusBSOConfigError, match="power_w is -1"):
        auto(-1.0, nvml=FakeNvml([]))
    assert caplog.records == []


def test_estimate_is_warned_of_once_in_a_short_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        auto(61.0, nvml=FakeNvml(broken="Driver Not Loaded"))
        auto(61.0, nvml=FakeNvml([]))

    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "zeus_plugins.energy",
            "WARNING",
            "energy is estimated as 61 W × CPU time / cores, not measured (why: zeus-plugins doctor)",
        )
    ]


def test_causes_of_an_estimate_are_kept_for_the_doctor() -> None:
    assert choose(61.0, probes=probes_of(FakeNvml(broken="Driver Not Loaded"))).causes == (
        "the NVIDIA driver does not answer: Driver Not Loaded",
        "no CPU package counts its energy in /nowhere (RAPL)",
    )


def test_missing_watts_are_requested() -> None:
    assert choose(probes=probes_of(FakeNvml([]))).warning == (
        "energy is estimated as 65 W × CPU time / cores, not measured; ZEUS_ESTIMATED_POWER_W states your machine's"
        " watts at full load"
    )


@pytest.mark.skipif(has_nvidia_driver() or POWERCAP.exists(), reason="this machine measures energy")
def test_new_counter_is_an_entry_in_the_list_of_probes() -> None:
    mine = EstimateMonitor(1.0, basis="told by my meter")

    def probe(request: MonitorRequest) -> Choice:
        return request.choice(lambda **_: mine)

    assert energy.auto().source.startswith("estimate: 65 W assumed")
    assert energy.auto(probes=[probe, *PROBES]) is mine
