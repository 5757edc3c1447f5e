"""Setting power limits through NVML (simulated, and real if available) and by real commands."""

from __future__ import annotations

import inspect
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.power_limit_bench import ANY_LENGTH, machine
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import (
    Energy,
    NvmlDevice,
    PowerLimitDevice,
    PowerLimitProfiler,
    PowerLimitUnavailableError,
    find_devices,
)
from zeus_plugins.power_limit.devices import set_and_check

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
        lambda: find_devices(nvml=nvml), Energy(), monitor=where.monitor, warmup_steps=0, profile_steps=1, **ANY_LENGTH
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


def by_command(command: str, **of_gpu: Any) -> tuple[PowerLimitDevice, FakeGpu]:
    """Return a device that sets limits by this command, and its GPU."""
    gpu = FakeGpu(uuid="GPU-aaa", **of_gpu)
    with patch.dict(os.environ, {"ZEUS_POWER_LIMIT_COMMAND": command}):
        (device,) = find_devices(nvml=FakeNvml([gpu]))
    return device, gpu


def test_command_sets_the_limit(tmp_path: Path) -> None:
    script, told = tmp_path / "set limit.sh", tmp_path / "told"
    script.write_text(f'echo "$@" > "{told}"')
    device, gpu = by_command(f"sh '{script}' {{index}} {{uuid}} {{watts}} {{milliwatts}}")
    device.set_limit_w(274.625)
    assert told.read_text() == "0 GPU-aaa 274.625 274625\n"
    device.set_limit_w(275.0)
    assert told.read_text() == "0 GPU-aaa 275 275000\n"
    assert (gpu.limit_mw, device.limit_w(), device.range_w()) == (700_000, 700.0, (200.0, 700.0))
    with pytest.raises(PowerLimitUnavailableError):  # the command set no limit
        set_and_check(device, 400.0)
    copy = pickle.loads(pickle.dumps(device))  # noqa: S301 - made in this line
    copy.set_limit_w(300.0)
    assert told.read_text() == "0 GPU-aaa 300 300000\n"


def test_command_is_not_interpreted_by_a_shell(tmp_path: Path) -> None:
    by_command(f"touch {tmp_path}/{{index}}-{{watts}};id")[0].set_limit_w(250.0)
    assert (tmp_path / "0-250;id").exists()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("sh -c 'echo not allowed >&2; exit 7' {index} {watts}", "ended with status 7: not allowed"),
        ("false {index} {watts}", "ended with status 1: nothing"),
        ("/nowhere/set-limit {index} {watts}", "could not be run: .*No such file"),
    ],
)
def test_failing_command_is_reported(template: str, problem: str) -> None:
    with pytest.raises(PowerLimitUnavailableError, match=problem):
        by_command(template)[0].set_limit_w(250.0)


@pytest.mark.parametrize(
    ("template", "problem"),
    [(f"set-limit {fields}", "it needs {uuid} or {index}, and {watts}") for fields in ("", "{index}", "{watts}")]
    + [
        ("set-limit {index} {watts} {user}", "and no others"),
        ("set-limit {index", "cannot be read"),
        ("set '{}", "cannot be read"),
    ],
)
def test_command_without_gpu_or_watts_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=re.escape(problem)):
        by_command(template)


def test_command_of_the_environment_is_used_for_all_gpus(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_POWER_LIMIT_COMMAND", f"touch {tmp_path}/{{index}}-{{watts}}")
    for device in find_devices(nvml=nvml):
        device.set_limit_w(300.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0-300", "1-300"}


def test_socket_of_zeusd_is_refused_with_the_replacement(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "/var/run/zeusd.sock")
    with pytest.raises(PowerLimitUnavailableError, match="ZEUSD_SOCK_PATH is no longer read: set ZEUS_POWER_LIMIT_COM"):
        find_devices(nvml=nvml)
    monkeypatch.setenv("ZEUS_POWER_LIMIT_COMMAND", "curl {index} {milliwatts}")
    assert find_devices(nvml=nvml)
