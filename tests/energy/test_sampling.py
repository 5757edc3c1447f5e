"""Integrated power, its reading thread, and frozen counters."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from tests.support import ROOT
from tests.support.energy_bench import window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from zeus_plugins.energy import EnergyMonitor, EnergyUnavailableError, Measurement, NvmlMonitor, NvmlPowerMonitor
from zeus_plugins.energy.counters import IntegratedPower, Sampler
from zeus_plugins.protocol import GpuConfig

P100 = "Tesla P100"
SOURCE = "nvml power, integrated"
LONG_S = 60.0  # A thread that has not done its work until now never will.


def old_gpu(power_w: float = 100.0) -> FakeGpu:
    return FakeGpu(name=P100, counter_mj=None, max_power_mw=250_000, power_mw=round(power_w * 1000))


@dataclass
class Meter:
    """A device with a power set by the test."""

    power: float = 0.0
    max_power_w: float = 250.0

    def instant_power_w(self) -> float:
        return self.power


@dataclass
class CountingNvml(FakeNvml):
    """A driver that signals after a number of power readings."""

    enough: int = 5
    reached: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802
        self.asked += 1
        if self.asked >= self.enough:
            self.reached.set()
        return super().nvmlDeviceGetPowerUsage(handle)


Samplers = Callable[[], list[threading.Thread]]


@pytest.fixture(name="samplers")
def make_samplers() -> Samplers:
    """Threads started by this test and still running."""
    gc.collect()
    before = set(threading.enumerate())
    return lambda: [each for each in threading.enumerate() if each.name == "zeus-energy-sampler" and each not in before]


# ---- The integral --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    readings=st.lists(
        st.tuples(st.floats(min_value=0.01, max_value=5.0), st.floats(min_value=0.0, max_value=1000.0)),
        min_size=2,
        max_size=40,
    )
)
def test_integral_matches_numpy(readings: list[tuple[float, float]]) -> None:
    clock = Clock(now_s=0.0)
    meter = Meter()
    integral = IntegratedPower(meter, clock)
    times_s, powers_w = [], []
    for step_s, meter.power in readings:
        clock.now_s += step_s
        integral.energy_uj()
        times_s.append(clock.now_s)
        powers_w.append(meter.power)

    # The last reading is taken twice at the same instant, which adds nothing.
    assert integral.energy_uj() / 1e6 == pytest.approx(trapezoid(powers_w, times_s), rel=1e-9, abs=1e-6)


def test_mean_of_the_past_second_is_not_read_where_the_present_power_is_known() -> None:
    gpu, clock = FakeGpu(counter_mj=None, power_mw=80_000, instant_mw=400_000), Clock()
    assert window(NvmlPowerMonitor(nvml=FakeNvml([gpu]), clock=clock), clock, 0.5).energy_j == pytest.approx(200.0)


# ---- The monitor ---------------------------------------------------------------------------------------------------


def test_power_is_integrated_over_the_window_and_summed_over_gpus() -> None:
    nvml, clock = FakeNvml([old_gpu(100.0), old_gpu(40.0)]), Clock()
    monitor = NvmlPowerMonitor(nvml=nvml, clock=clock)
    # Independent of the number of readings: all find the same watts at the same instants.
    assert window(monitor, clock, 0.75) == Measurement(0.75, pytest.approx(105.0), SOURCE)
    assert monitor.gpus() == GpuConfig(max_power=500.0, number_of_gpus=2, gpu_model=P100)


def test_power_windows_may_overlap_and_late_readings_are_reported() -> None:
    nvml, clock = FakeNvml([old_gpu()]), Clock()
    monitor = NvmlPowerMonitor(nvml=nvml, clock=clock)

    monitor.begin_window("training")
    clock.now_s += 1.5
    monitor.begin_window("later")
    late = f"{SOURCE}, with gaps above 1 s"
    assert monitor.end_window("training") == Measurement(1.5, pytest.approx(150.0), late)
    clock.now_s += 0.25
    assert monitor.end_window("later") == Measurement(0.25, pytest.approx(25.0), SOURCE)


def test_time_between_windows_is_no_gap() -> None:
    nvml, clock = FakeNvml([old_gpu()]), Clock()
    monitor = NvmlPowerMonitor(nvml=nvml, clock=clock)
    for _ in range(2):
        assert window(monitor, clock, 0.5) == Measurement(0.5, pytest.approx(50.0), SOURCE)
        clock.now_s += 100.0


def test_gpu_without_a_power_reading_is_unavailable() -> None:
    with pytest.raises(EnergyUnavailableError, match=r"GPU 0 \(Tesla P100\) gives no power reading: Not Supported"):
        NvmlPowerMonitor(nvml=FakeNvml([FakeGpu(name=P100)])).gpus()


# ---- The thread ----------------------------------------------------------------------------------------------------


def test_thread_reads_during_windows_and_ends_with_the_last(samplers: Samplers) -> None:
    nvml = CountingNvml([old_gpu()])
    monitor = NvmlPowerMonitor(nvml=nvml)
    monitor.gpus()
    assert samplers() == []

    monitor.begin_window("a")
    (thread,) = samplers()
    assert thread.daemon
    monitor.begin_window("b")
    assert nvml.reached.wait(LONG_S)
    monitor.end_window("a")
    assert samplers() == [thread]
    monitor.end_window("b")
    assert samplers() == []
    monitor.begin_window("again")
    assert len(samplers()) == 1
    monitor.end_window("again")


def test_failed_begin_of_a_window_leaves_no_thread(samplers: Samplers) -> None:
    nvml = FakeNvml([old_gpu()])
    monitor = NvmlPowerMonitor(nvml=nvml)
    monitor.gpus()
    nvml.machine[0].power_mw = None

    with pytest.raises(EnergyUnavailableError, match="gives no power reading"):
        monitor.begin_window("training")
    assert samplers() == []


def test_signal_at_the_end_of_a_window_does_not_disable_later_threads(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = NvmlPowerMonitor(nvml=FakeNvml([old_gpu()]))
    stop = Sampler.stop

    def stop_and_raise(sampler: Sampler) -> None:
        stop(sampler)
        raise KeyboardInterrupt

    monitor.begin_window("training")
    monkeypatch.setattr(Sampler, "stop", stop_and_raise)
    with pytest.raises(KeyboardInterrupt):
        monitor.end_window("training")
    monkeypatch.setattr(Sampler, "stop", stop)
    monitor.begin_window("again")
    assert len(samplers()) == 1
    monitor.end_window("again")


def test_dropped_monitor_with_an_open_window_stops_reading(samplers: Samplers) -> None:
    monitor = NvmlPowerMonitor(nvml=FakeNvml([old_gpu()]))
    monitor.begin_window("training")
    (thread,) = samplers()
    del monitor
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_failed_readings_are_bridged(caplog: pytest.LogCaptureFixture, samplers: Samplers) -> None:
    failed_twice = threading.Event()
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            failed_twice.set()
        raise EnergyUnavailableError("GPU 0 gives no power reading")

    with caplog.at_level(logging.DEBUG, logger="zeus_plugins.energy"):
        sampler = Sampler(fail, 0.01)
        assert failed_twice.wait(LONG_S)
        assert samplers()
        sampler.stop()
    assert not samplers()
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "DEBUG"]


FORK = """
    import os, threading
    from tests.support.fake_nvml import FakeGpu, FakeNvml
    from zeus_plugins.energy import NvmlPowerMonitor
    from zeus_plugins.errors import ZeusBSOOperationOrderError

    class Nvml(FakeNvml):
        read_by_threads = 0
        reached = threading.Event()

        def nvmlDeviceGetPowerUsage(self, handle):
            if threading.current_thread() is not threading.main_thread():
                self.read_by_threads += 1
                self.reached.set()
            return 100_000

    nvml = Nvml([FakeGpu()])
    monitor = NvmlPowerMonitor(nvml=nvml)
    monitor.begin_window("parent")
    assert nvml.reached.wait(60)
    # A lock that the sampler happens to hold at the fork stays locked in the child.
    monitor._sampler.lock.acquire()
    child = os.fork()
    if child == 0:
        nvml.reached = threading.Event()
        try:
            monitor.end_window("parent")
        except ZeusBSOOperationOrderError as error:
            assert "begin and end a window in one process" in str(error), error
        else:
            raise SystemExit("the parent's window ended in the child")
        monitor.begin_window("parent")
        assert nvml.reached.wait(60)
        assert monitor.end_window("parent").energy_j > 0
        print("child measured", flush=True)
        os._exit(0)
    monitor._sampler.lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert monitor.end_window("parent").energy_j > 0
    print("parent measured")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_measures_independently_and_the_parent_continues() -> None:
    # Newer Pythons warn of any fork with threads, which this test needs.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)

    assert done.stdout.splitlines() == ["child measured", "parent measured"], done.stderr


# --- Frozen counters ------------------------------------------------------------------------------------------------

MakeMonitor = type[NvmlMonitor] | type[NvmlPowerMonitor]


def frozen(kind: MakeMonitor) -> tuple[EnergyMonitor, FakeNvml, Clock]:
    nvml, clock = FakeNvml([FakeGpu(power_mw=0)]), Clock()
    return kind(nvml=nvml, clock=clock), nvml, clock


@pytest.mark.parametrize("kind", [NvmlMonitor, NvmlPowerMonitor])
def test_counter_frozen_for_a_second_is_replaced_by_an_estimate(
    kind: MakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    monitor, _, clock = frozen(kind)
    for _ in range(2):
        measured = window(monitor, clock, 1.0)
        assert (measured.time_s, measured.energy_j) == (1.0, 700.0)
        assert measured.source == (
            f"{monitor.source}, but estimate: 700 W for 1 of 1 devices, whose counter does not count"
        )
    assert [record.getMessage() for record in caplog.records] == [
        "the energy counter of GPU 0 (NVIDIA H200) has not moved: while it does not count, 700 W × time is taken"
        " instead, an estimate"
    ]


def test_counter_may_stay_constant_for_less_than_a_second_over_short_windows() -> None:
    monitor, _, clock = frozen(NvmlMonitor)
    assert window(monitor, clock, 0.99) == Measurement(pytest.approx(0.99), 0.0, "nvml")
    monitor, _, clock = frozen(NvmlMonitor)
    assert [window(monitor, clock, 0.5).energy_j for _ in range(3)] == [0.0, 350.0, 350.0]


def test_moving_counter_is_trusted_again() -> None:
    monitor, nvml, clock = frozen(NvmlMonitor)
    assert window(monitor, clock, 2.0).energy_j == 1400.0
    assert window(monitor, clock, 2.0, lambda: nvml.machine[0].spend(600_000)).energy_j == 600.0


def test_only_the_frozen_device_is_estimated() -> None:
    nvml, clock = FakeNvml([FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]), Clock()
    measured = window(NvmlMonitor(nvml=nvml, clock=clock), clock, 2.0, lambda: nvml.machine[1].spend(300_000))
    assert measured.energy_j == 2 * 700.0 + 300.0
    assert "estimate: 700 W for 1 of 2 devices" in measured.source


def test_falling_counter_adds_no_energy(caplog: pytest.LogCaptureFixture) -> None:
    nvml, clock = FakeNvml(), Clock()
    measured = window(NvmlMonitor(nvml=nvml, clock=clock), clock, 0.25, lambda: nvml.machine[0].spend(-6_999_988))
    assert measured.energy_j == 175.0
    assert "estimate" in measured.source
    assert "GPU 0 (NVIDIA H200) has fallen" in caplog.text
