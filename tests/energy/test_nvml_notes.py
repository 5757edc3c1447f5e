"""Energy shared with other processes on the GPU, or with the rest of a superchip's module."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.energy_bench import window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml, FakeNvmlError
from zeus_plugins.energy import NvmlMonitor, NvmlPowerMonitor, nvml
from zeus_plugins.protocol import JobView
from zeus_plugins.training.announce import warn_of_scopes

OTHERS = "shared with other processes"


def test_foreign_process_that_ends_within_a_window_stands_in_its_source_only() -> None:
    gpu = FakeGpu(pids=[4_000_001])
    monitor = NvmlMonitor(nvml=FakeNvml([gpu]), clock=Clock())
    monitor.begin_window("a")
    gpu.pids.clear()
    assert monitor.end_window("a").source == f"nvml, {OTHERS}"
    assert window(monitor, Clock(), 0.0).source == "nvml"


def test_foreign_process_that_ends_before_a_window_begins_does_not_stand_in_its_source() -> None:
    gpu = FakeGpu(pids=[4_000_001])
    monitor = NvmlMonitor(nvml=FakeNvml([gpu]), clock=Clock())
    monitor.begin_window("first")
    gpu.pids.clear()
    monitor.begin_window("second")
    sources = [monitor.end_window(name).source for name in ("first", "second")]
    assert sources == [f"nvml, {OTHERS}", "nvml"]


def test_ranks_and_children_of_the_training_are_no_foreign_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gpu = FakeGpu(pids=[child.pid, 4_000_001])
        monitor = NvmlMonitor(nvml=FakeNvml([gpu]), clock=Clock())
        monitor.include([4_000_001])
        assert window(monitor, Clock(), 0.0).source == "nvml"
        child.kill()


@pytest.mark.parametrize(("is_used", "others"), [(True, 0), (False, 1)])
def test_process_id_from_outside_of_a_container_may_be_this_process(
    monkeypatch: pytest.MonkeyPatch, is_used: bool, others: int
) -> None:
    monkeypatch.setattr(nvml, "is_hidden", lambda _: True)
    monkeypatch.setattr(nvml, "gpu_is_used", lambda: is_used)
    driver = FakeNvml([FakeGpu(pids=[4_000_001])])
    assert nvml.open_gpus(driver)[0].other_processes() == others


def source_of(gpu: FakeGpu, kind: type[NvmlMonitor] | type[NvmlPowerMonitor] = NvmlMonitor) -> str:
    clock = Clock()
    return window(kind(nvml=FakeNvml([gpu]), clock=clock), clock, 0.0).source


@pytest.mark.parametrize(
    ("pids", "mps_pids", "others"),
    [
        ([], [], 0),
        ([os.getpid()], [], 0),
        ([4_000_001], [], 1),
        ([os.getpid(), 4_000_001], [], 1),
        ([4_000_001, 4_000_002, 4_000_003], [], 3),
        ([4_000_001], [os.getpid()], 0),  # MPS's own server
        ([4_000_001], [os.getpid(), 4_000_002], 1),
    ],
    ids=["none told", "alone", "only a foreign one", "time slicing", "three", "MPS alone", "MPS shared"],
)
def test_foreign_processes_are_reported_once_and_named_in_the_source(
    caplog: pytest.LogCaptureFixture, pids: list[int], mps_pids: list[int], others: int
) -> None:
    monitor = NvmlMonitor(nvml=FakeNvml([FakeGpu(pids=pids, mps_pids=mps_pids)]), clock=Clock())
    for _ in range(2):
        assert window(monitor, Clock(), 0.0).source == (f"nvml, {OTHERS}" if others else "nvml")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == bool(others)
    if others:
        assert f"({others} on GPU 0 (NVIDIA H200)): its energy is theirs, too" in warnings[0]


def test_old_driver_without_processes_and_scopes_claims_nothing() -> None:
    class Old(FakeNvml):
        def __getattribute__(self, name: str) -> Any:
            if "Processes" in name:
                raise AttributeError(name)
            return super().__getattribute__(name)

        def nvmlDeviceGetFieldValues(self, *_: Any) -> Any:  # noqa: N802
            raise FakeNvmlError("Not Supported")

    assert window(NvmlMonitor(nvml=Old(), clock=Clock()), Clock(), 0.0).source == "nvml"


GH200 = "NVIDIA GH200 480GB"


class Rising(FakeNvml):
    """A driver whose counters rise by the given watts every 100 ms of its clock, which `sleep` moves."""

    def __init__(self, gpu: FakeGpu, power_w: float) -> None:
        super().__init__([gpu])
        self.clock, self.slept_s, self._power_w = Clock(), 0.0, power_w

    def sleep(self, time_s: float) -> None:
        before = round(self.clock.now_s * 1000) // 100
        self.clock.now_s += time_s
        self.slept_s += time_s
        self.machine[0].spend(round(100 * self._power_w) * (round(self.clock.now_s * 1000) // 100 - before))


@pytest.mark.parametrize(
    ("scopes_mw", "plain_mw", "counter_w", "note"),
    [
        ({0: 400_000, 1: 600_000}, 400_000, 547.0, ", module scope"),
        ({0: 400_000, 1: 600_000}, 600_000, 410.0, ", GPU scope"),
        ({0: 400_000, 1: 600_000}, 598_000, 0.0, ", module scope"),
        ({0: 400_000, 1: 600_000}, 405_000, 0.0, ", GPU scope"),
        ({1: 600_000}, 600_000, 600.0, ", module scope"),
        ({0: 400_000, 1: 400_000}, 400_000, 400.0, ""),
        ({0: 400_000}, 400_000, 400.0, ""),
        ({}, 400_000, 400.0, ""),
    ],
    ids=["module", "GPU", "still module", "still GPU", "module alone", "one scope", "no module", "neither"],
)
def test_source_names_superchip_scope_whose_power_is_closest_to_the_counters_slope(
    scopes_mw: dict[int, int], plain_mw: int, counter_w: float, note: str
) -> None:
    driver = Rising(FakeGpu(name=GH200, power_mw=plain_mw, scopes_mw=scopes_mw), counter_w)
    monitor = NvmlMonitor(nvml=driver, clock=driver.clock, sleep=driver.sleep)
    assert window(monitor, driver.clock, 0.0).source == f"nvml{note}"
    assert driver.slept_s <= 0.51


@pytest.mark.parametrize(
    ("scopes_mw", "note"),
    [({0: 400_000, 1: 600_000}, ", GPU scope"), ({1: 600_000}, ", module scope"), ({0: 400_000}, "")],
    ids=["both", "module alone", "no module"],
)
def test_integrated_power_has_gpu_scope_if_the_driver_gives_it(scopes_mw: dict[int, int], note: str) -> None:
    gpu = FakeGpu(name=GH200, power_mw=600_000, scopes_mw=scopes_mw)
    assert source_of(gpu, NvmlPowerMonitor) == f"nvml power, integrated{note}"


def test_scope_and_foreign_processes_are_named_together() -> None:
    gpu = FakeGpu(power_mw=600_000, scopes_mw={0: 400_000, 1: 600_000}, pids=[1, 2])
    assert source_of(gpu) == f"nvml, module scope, {OTHERS}"


def job_of(*sources: str | None) -> JobView:
    trials = [SimpleNamespace(energy_source=source) for source in sources]
    return cast("JobView", SimpleNamespace(trials=trials, job=SimpleNamespace(job_id="mnist-1")))


def test_trials_in_two_scopes_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_scopes(job_of("nvml", None, "nvml, GPU scope", "nvml, GPU scope + estimate"))
    assert caplog.records == []
    warn_of_scopes(job_of("nvml, GPU scope", "2 nodes: nvml, module scope", "nvml, GPU scope"))
    (record,) = caplog.records
    assert "job mnist-1, 2 have the energy of the GPUs only and 1 the energy of their modules" in (record.getMessage())
