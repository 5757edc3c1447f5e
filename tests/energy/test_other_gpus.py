"""GPUs that train but cannot be measured, and a driver's library that is missing, replaced or wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.energy_bench import probes_of, window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.fake_powercap import make_powercap, spend_uj
from zeus_plugins import energy
from zeus_plugins.energy import (
    EnergyUnavailableError,
    EstimateMonitor,
    NvmlMonitor,
    NvmlPowerMonitor,
    RaplMonitor,
)
from zeus_plugins.energy.auto import choose
from zeus_plugins.errors import ZeusBSOConfigError

NO_LIBRARY = FakeNvml(broken="NVML Shared Library Not Found")


def start_gpu(monkeypatch: pytest.MonkeyPatch, *started: str) -> None:
    """Let PyTorch have started these kinds of devices."""
    torch = SimpleNamespace(
        **{kind: SimpleNamespace(is_initialized=lambda kind=kind: kind in started) for kind in ("cuda", "xpu")},
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False)),
        version=SimpleNamespace(hip=None),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_started_gpu_without_nvml_is_estimated_beside_a_readable_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    start_gpu(monkeypatch, kind)
    chosen = energy.auto(300.0, probes=probes_of(NO_LIBRARY, powercap=make_powercap(tmp_path)))
    assert chosen.source == "estimate: 300 W stated"
    assert "NVML Shared Library Not Found (in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility" in caplog.text


def test_gpus_with_the_counter_of_the_same_module_count_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = [FakeGpu(uuid=f"GPU-{name}", module="GB200", instant_mw=500_000, power_mw=1_200_000) for name in "ab"]
    driver, clock = FakeNvml(machine), Clock()
    with pytest.raises(EnergyUnavailableError, match=r"GPU 0 .* and GPU 1 .* give the same counter"):
        NvmlMonitor(nvml=driver).gpus()
    assert energy.auto(probes=probes_of(driver)).source == "nvml power, integrated"
    assert "that of their module: energy is integrated from power readings instead" in caplog.text
    spent = window(NvmlPowerMonitor(nvml=driver, clock=clock), clock, 10.0)
    assert spent.energy_j == pytest.approx(2 * 500 * 10)
    assert NvmlMonitor([1], nvml=driver).gpus().number_of_gpus == 1
    apart = FakeNvml([replace(gpu, module=gpu.uuid, counter_mj=number) for number, gpu in enumerate(machine, start=7)])
    assert NvmlMonitor(nvml=apart).gpus().number_of_gpus == 2


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
def test_another_accelerator_is_no_training_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    probes = probes_of(FakeNvml(), powercap=make_powercap(tmp_path))
    chosen = energy.auto(300.0, device_indices=[kind], probes=probes)
    assert chosen.source == "estimate: 300 W stated"
    assert f"does not read the energy of {kind} devices" in caplog.text
    assert isinstance(energy.auto(device_indices=(), probes=probes), RaplMonitor)


def test_gpu_started_after_the_choice_of_the_cpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, clock = make_powercap(tmp_path), Clock()
    monitor = RaplMonitor(root=root, clock=clock)
    start_gpu(monkeypatch)
    assert window(monitor, clock, 0.5, lambda: spend_uj(root, "intel-rapl:0", 10**6)).source == "rapl"
    start_gpu(monkeypatch, "cuda")
    assert window(monitor, clock, 0.5).source.endswith(", without the GPU that the training uses")


@pytest.mark.parametrize("indices", [[0, "GPU-1"], ["GPU-1", 0]])
def test_indices_and_uuids_are_measured_together(indices: Sequence[int | str]) -> None:
    driver, clock = FakeNvml([FakeGpu(uuid=f"GPU-{each}") for each in range(3)]), Clock()
    monitor = NvmlMonitor(indices, nvml=driver, clock=clock)
    assert window(monitor, clock, 1.0, lambda: driver.spend(1_000, 20_000, 300_000)).energy_j == 21.0


@pytest.mark.parametrize(
    ("indices", "error"), [([99, "GPU-1"], "name one or more of the 2 visible GPUs"), ([1, "GPU-1"], "named twice")]
)
def test_wrong_indices_beside_uuids_are_refused(indices: Sequence[int | str], error: str) -> None:
    driver = FakeNvml([FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1")])
    with pytest.raises(ZeusBSOConfigError, match=error):
        NvmlMonitor(indices, nvml=driver).gpus()


class OldBindings:
    """The functions of a package that replaces nvidia-ml-py, such as nvidia-ml-py3."""

    def __init__(self) -> None:
        self._driver = FakeNvml()

    def __getattr__(self, name: str) -> Any:
        if "Mig" in name:
            raise AttributeError(name)
        return getattr(self._driver, name)


def test_package_in_place_of_the_bindings_leads_to_an_estimate(tmp_path: Path) -> None:
    choice = choose(99.0, probes=probes_of(OldBindings(), powercap=make_powercap(tmp_path)))
    assert isinstance(choice.monitor, EstimateMonitor)
    assert choice.monitor.source == "estimate: 99 W stated"
    assert "another package replaces pynvml: reinstall nvidia-ml-py" in (choice.warning or "")


def test_both_frameworks_name_another_accelerator() -> None:
    from zeus_plugins.huggingface._trainer import HuggingFacePort
    from zeus_plugins.lightning._trainer import LightningPort

    device = SimpleNamespace(type="xpu")
    lightning, huggingface = object.__new__(LightningPort), object.__new__(HuggingFacePort)
    vars(lightning)["_trainer"] = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    vars(huggingface)["_args"] = SimpleNamespace(device=device)
    assert lightning.gpu_indices == huggingface.gpu_indices == ["xpu"]
    device.type = "cpu"
    assert lightning.gpu_indices == huggingface.gpu_indices == ()
