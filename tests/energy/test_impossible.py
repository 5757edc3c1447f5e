"""Readings that a device cannot have are estimated, and the source says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.energy_bench import window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.fake_powercap import add_zone, spend_uj
from zeus_plugins.energy import Measurement, NvmlMonitor, NvmlPowerMonitor, RaplMonitor

NOT_COUNTED = "but estimate: {:g} W for 1 of 1 devices, whose counter does not count"
PACKAGE = "intel-rapl:0"


def reset(root: Path) -> None:
    (root / PACKAGE / "energy_uj").write_text("1000\n")


def jump(root: Path) -> None:
    spend_uj(root, PACKAGE, 5_400 * 30 * 10**6)


@pytest.mark.parametrize("fault", [reset, jump])
def test_impossible_watts_of_a_package_become_an_estimate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Callable[[Path], None]
) -> None:
    add_zone(tmp_path, PACKAGE, "package-0", energy_uj=90_000_000_000)
    clock = Clock()
    measured = window(RaplMonitor(root=tmp_path, clock=clock), clock, 30.0, lambda: fault(tmp_path))
    assert measured == Measurement(30.0, 125.0 * 30, f"rapl, {NOT_COUNTED.format(125)}")
    assert "has risen by more than twice the device's maximum power" in caplog.text


def test_only_the_time_of_an_impossible_reading_is_estimated(tmp_path: Path) -> None:
    counter = add_zone(tmp_path, PACKAGE, "package-0", energy_uj=90_000_000_000) / "energy_uj"
    clock = Clock()
    monitor = RaplMonitor(root=tmp_path, clock=clock)
    monitor.begin_window("epoch")
    for reading_uj in (90_800_000_000, 0, 92_400_000_000, 93_200_000_000):  # 80 W, and one reading of 0
        clock.now_s += 10.0
        counter.write_text(f"{reading_uj}\n")
        monitor.begin_window("step")
        monitor.end_window("step")
    measured = monitor.end_window("epoch")
    assert measured.energy_j == 2 * 800.0 + 2 * 1250.0
    assert "estimate: 125 W for 1 of 1 devices" in measured.source
    assert window(monitor, clock, 10.0, lambda: spend_uj(tmp_path, PACKAGE, 800_000_000)).source == "rapl"


def test_gap_in_which_a_package_may_wrap_twice_is_named(tmp_path: Path) -> None:
    add_zone(tmp_path, PACKAGE, "package-0", max_power_uw=300_000_000)
    clock = Clock()
    monitor = RaplMonitor(root=tmp_path, clock=clock)
    stopped = window(monitor, clock, 1800.0, lambda: spend_uj(tmp_path, PACKAGE, 300 * 1800 * 10**6))
    assert stopped.source == "rapl, with gaps above 873.8 s"
    assert window(monitor, clock, 800.0, lambda: spend_uj(tmp_path, PACKAGE, 10**9)).source == "rapl"


@pytest.mark.parametrize("limits_w", [(15.0, None), (15.0, 45.0), (125.0, 253.0), (None, None)])
def test_right_counter_is_measured_whatever_the_limit(
    tmp_path: Path, limits_w: tuple[float | None, float | None]
) -> None:
    zone = add_zone(tmp_path, PACKAGE, "package-0", max_power_uw=None)
    for place, limit_w in enumerate(limits_w):
        if limit_w is not None:
            (zone / f"constraint_{place}_power_limit_uw").write_text(f"{limit_w * 1e6:.0f}\n")
    clock = Clock()
    power_w = 45.0 if limits_w[0] == 15.0 else 280.0
    monitor = RaplMonitor(root=tmp_path, max_power_w=20.0, clock=clock)
    measured = window(monitor, clock, 60.0, lambda: spend_uj(tmp_path, PACKAGE, int(power_w * 60) * 10**6))
    assert measured == Measurement(60.0, power_w * 60, "rapl")


def test_impossible_limits_of_package_and_memory_are_ignored(tmp_path: Path) -> None:
    zone = add_zone(tmp_path, PACKAGE, "package-0", max_power_uw=4_095_000_000)
    (zone / "constraint_0_power_limit_uw").write_text("205000000\n")
    add_zone(tmp_path, f"{PACKAGE}:0", "dram", max_power_uw=3_408_000_000)
    assert RaplMonitor(root=tmp_path).gpus().max_power == 205.0


def test_jumping_counter_of_a_gpu_becomes_an_estimate() -> None:
    nvml, clock = FakeNvml(), Clock()
    measured = window(NvmlMonitor(nvml=nvml, clock=clock), clock, 2.5, lambda: nvml.machine[0].spend(2**32))
    assert measured == Measurement(2.5, 1750.0, f"nvml, {NOT_COUNTED.format(700)}")


def test_impossible_power_of_a_gpu_becomes_an_estimate() -> None:
    nvml, clock = FakeNvml([FakeGpu(counter_mj=None, power_mw=593_000, max_power_mw=175_000)]), Clock()
    measured = window(NvmlPowerMonitor(nvml=nvml, clock=clock), clock, 0.5)
    assert measured == Measurement(0.5, 87.5, f"nvml power, integrated, {NOT_COUNTED.format(175)}")


def test_gpu_without_a_limit_is_measured_up_to_two_kilowatts() -> None:
    nvml, clock = FakeNvml([FakeGpu(max_power_mw=None)]), Clock()
    monitor = NvmlMonitor(max_power_w=65.0, nvml=nvml, clock=clock)
    assert window(monitor, clock, 10.0, lambda: nvml.machine[0].spend(3_000_000)).source == "nvml"
    assert "estimate: 65 W" in window(monitor, clock, 10.0, lambda: nvml.machine[0].spend(30_000_000)).source


def test_standstill_of_an_inner_window_leaves_the_outer_window_measured() -> None:
    nvml, clock = FakeNvml(), Clock()
    monitor = NvmlMonitor(nvml=nvml, clock=clock)
    monitor.begin_window("outer")
    assert "estimate" in window(monitor, clock, 1.0).source
    nvml.machine[0].spend(900_000)
    assert monitor.end_window("outer") == Measurement(1.0, 900.0, "nvml")
