"""Setting power limits through NVML (simulated, and real if available) and by real commands."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.power_limit_bench import FileDevice, Forbidden, machine
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import (
    COMMAND_VARIABLE,
    CommandDevice,
    Energy,
    NvmlDevice,
    PowerLimitProfiler,
    PowerLimitUnavailableError,
    find_devices,
)

TWO_GPUS = ("GPU-aaa", "GPU-bbb")


@pytest.fixture(name="nvml")
def make_nvml() -> FakeNvml:
    return FakeNvml([FakeGpu(uuid=uuid) for uuid in TWO_GPUS])


# NVML


def test_limits_are_read_and_set_in_watts(nvml: FakeNvml) -> None:
    first, second = find_devices(nvml=nvml)
    assert (first.range_w(), first.limit_w()) == ((200.0, 700.0), 700.0)
    second.set_limit_w(312.5)
    assert [gpu.limit_mw for gpu in nvml.machine] == [700_000, 312_500]
    assert second.limit_w() == 312.5
    assert str(second) == "GPU 1 (NVIDIA H200)"


def test_visible_gpus_keep_the_numbers_of_nvidia_smi(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbb")
    (device,) = find_devices(nvml=nvml)
    assert isinstance(device, NvmlDevice)
    assert (device.uuid, device.index) == ("GPU-bbb", 1)
    device.set_limit_w(250.0)
    assert [gpu.limit_mw for gpu in nvml.machine] == [700_000, 250_000]


def test_only_the_training_gpus_are_found(nvml: FakeNvml) -> None:
    with pytest.raises(PowerLimitUnavailableError, match="runs on no NVIDIA GPU"):
        find_devices([], nvml=nvml)
    assert nvml.calls == []
    assert [str(device) for device in find_devices([1], nvml=nvml)] == ["GPU 1 (NVIDIA H200)"]


@pytest.mark.parametrize(
    ("gpu", "ask", "problem"),
    [
        (FakeGpu(may_set_limit=False), lambda device: device.set_limit_w(300.0), "Insufficient Permissions"),
        (FakeGpu(), lambda device: device.set_limit_w(100.0), "Invalid Argument"),
        (FakeGpu(limit_mw=None), lambda device: device.limit_w(), "Not Supported"),
        (FakeGpu(max_power_mw=None), lambda device: device.range_w(), "Not Supported"),
    ],
    ids=["permission", "range", "limit", "constraints"],
)
def test_refusal_by_the_driver_is_reported(gpu: FakeGpu, ask: Callable[[Any], object], problem: str) -> None:
    (device,) = find_devices(nvml=FakeNvml([gpu]))
    with pytest.raises(PowerLimitUnavailableError, match=rf"GPU 0 \(NVIDIA H200\) .*{problem}"):
        ask(device)


def test_without_a_driver_no_device_is_found() -> None:
    with pytest.raises(PowerLimitUnavailableError, match="the NVIDIA driver does not answer: Driver Not Loaded"):
        find_devices(nvml=FakeNvml(broken="Driver Not Loaded"))


def test_slice_of_a_gpu_is_not_changed() -> None:
    with pytest.raises(PowerLimitUnavailableError, match="MIG"):
        find_devices(nvml=FakeNvml([FakeGpu(mig_mode=1, slices=[1, 1])]))


def test_open_device_can_be_pickled(nvml: FakeNvml) -> None:
    device: Any
    (device, _) = find_devices(nvml=nvml)
    device.set_limit_w(300.0)
    copy = pickle.loads(pickle.dumps(device))  # noqa: S301 - made in this line
    copy.set_limit_w(400.0)
    assert copy.limit_w() == 400.0
    assert (copy.index, copy.uuid, str(copy)) == (device.index, device.uuid, str(device))


def test_profiler_sets_and_restores_all_gpus(nvml: FakeNvml) -> None:
    nvml.machine[1].limit_mw = 650_000
    where = machine()
    profiler = PowerLimitProfiler(
        lambda: find_devices(nvml=nvml), Energy(), monitor=where.monitor, warmup_steps=0, profile_steps=1
    )
    limits_w = []
    profiler.on_epoch_begin()
    for _ in range(30):
        limits_w.append([gpu.limit_mw for gpu in nvml.machine])
        where.train()
        profiler.on_step_end()
    # From the lowest of the limits in force down to the lowest possible limit.
    assert limits_w[:19] == [[watts * 1000] * 2 for watts in range(650, 199, -25)]
    profiler.close()
    assert [gpu.limit_mw for gpu in nvml.machine] == [700_000, 650_000]


def test_simulated_driver_takes_the_arguments_of_the_real_package() -> None:
    import pynvml

    for name in (each for each in vars(FakeNvml) if each.startswith("nvml")):
        real, ours = (inspect.signature(getattr(each, name)) for each in (pynvml, FakeNvml))
        required = [each for each in real.parameters.values() if each.default is each.empty]
        assert len(required) <= len(ours.parameters) - 1 <= len(real.parameters), name  # self


@pytest.mark.gpu
def test_real_gpu_reports_and_accepts_the_present_limit() -> None:
    if not has_nvidia_driver():
        pytest.skip("no NVIDIA driver on this machine")
    for device in find_devices():
        lowest_w, highest_w = device.range_w()
        found_w = device.limit_w()
        assert 0 < lowest_w <= found_w <= highest_w
        try:
            device.set_limit_w(found_w)
        except PowerLimitUnavailableError as error:
            assert "Permission" in str(error)  # noqa: PT017 - either is right
        assert device.limit_w() == found_w


# Commands


@pytest.fixture(name="gpu")
def make_gpu(tmp_path: Path) -> FileDevice:
    path = tmp_path / "limit"
    path.write_text("250.0")
    return FileDevice(path, index=3)


def test_command_sets_the_limit(gpu: FileDevice, tmp_path: Path) -> None:
    script = tmp_path / "set limit.sh"
    script.write_text(f'echo "$2" > "{gpu.path}"; echo "$1" > "{tmp_path}/index"')
    device = CommandDevice(f"sh '{script}' {{index}} {{watts}}", gpu)
    device.set_limit_w(174.625)
    assert gpu.path.read_text() == "174.625\n"
    device.set_limit_w(175.0)
    assert gpu.path.read_text() == "175\n"
    assert (tmp_path / "index").read_text() == "3\n"
    assert (device.range_w(), device.limit_w(), str(device)) == ((100.0, 250.0), 175.0, "GPU 3 (limit)")
    assert pickle.loads(pickle.dumps(device)).limit_w() == 175.0  # noqa: S301 - made in this line


def test_command_is_not_interpreted_by_a_shell(gpu: FileDevice, tmp_path: Path) -> None:
    CommandDevice(f"touch {tmp_path}/{{index}}-{{watts}};id", gpu).set_limit_w(150.0)
    assert (tmp_path / "3-150;id").exists()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("sh -c 'echo not allowed >&2; exit 7' {index} {watts}", "ended with status 7: not allowed"),
        ("false {index} {watts}", "ended with status 1: nothing"),
        ("/nowhere/set-limit {index} {watts}", "could not be run: .*No such file"),
    ],
)
def test_failing_command_is_reported(gpu: FileDevice, template: str, problem: str) -> None:
    with pytest.raises(PowerLimitUnavailableError, match=problem):
        CommandDevice(template, gpu).set_limit_w(150.0)


@pytest.mark.parametrize(
    ("template", "device", "problem"),
    [(f"set-limit {fields}", None, "it needs {uuid} or {index}, and {watts}") for fields in ("", "{index}", "{watts}")]
    + [
        ("set-limit {index} {watts} {user}", None, "and no others"),
        ("set-limit {index", None, "cannot be read"),
        ("set '{}", None, "cannot be read"),
        ("set {uuid} {watts}", None, "has no UUID: use {index}"),
        ("set-limit {index} {watts}", Forbidden(), "pass index"),
    ],
)
def test_command_without_gpu_or_watts_is_refused(
    gpu: FileDevice, template: str, device: Forbidden | None, problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=re.escape(problem)):
        CommandDevice(template, device or gpu)
    assert CommandDevice("set-limit {index} {watts}", Forbidden(), index=0).limit_w() == 200.0


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_configured_command_sets_limits_read_from_the_driver(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    command = (
        f"{sys.executable} -c 'import pathlib, sys; pathlib.Path(sys.argv[1]).touch()' {tmp_path}/{{index}}-{{watts}}"
    )
    if way == "environment":
        monkeypatch.setenv(COMMAND_VARIABLE, command)
    devices = find_devices(nvml=nvml, command=command if way == "argument" else None)
    for device in devices:
        device.set_limit_w(300.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0-300", "1-300"}
    assert [device.limit_w() for device in devices] == [700.0, 700.0]
