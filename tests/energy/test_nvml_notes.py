"""Energy shared with other processes on the GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.energy_bench import window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from zeus_plugins.energy import NvmlMonitor, nvml

OTHERS = "shared with other processes"


def test_foreign_process_ending_within_a_window_stands_in_the_source_of_this_window_only() -> None:
    gpu = FakeGpu(pids=[4_000_001])
    monitor = NvmlMonitor(nvml=FakeNvml([gpu]), clock=Clock())
    monitor.begin_window("a")
    gpu.pids.clear()
    assert monitor.end_window("a").source == f"nvml, {OTHERS}"
    assert window(monitor, Clock(), 0.0).source == "nvml"


def test_foreign_process_ending_before_a_window_does_not_stand_in_the_source() -> None:
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


@pytest.mark.parametrize(
    ("pids", "mps_pids", "others"),
    [
        ([], [], 0),
        ([os.getpid()], [], 0),
        ([4_000_001], [], 1),
        ([0, 2**32 - 1], [0], 0),
        ([os.getpid(), 4_000_001], [], 1),
        ([4_000_001, 4_000_002, 4_000_003], [], 3),
        ([4_000_001], [os.getpid()], 0),  # MPS's own server
        ([4_000_001], [os.getpid(), 4_000_002], 1),
    ],
    ids=[
        "none told",
        "alone",
        "only a foreign one",
        "ids are hidden",
        "time slicing",
        "three",
        "MPS alone",
        "MPS shared",
    ],
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
        assert "(on GPU 0 (NVIDIA H200)): its energy is theirs, too" in warnings[0]


def test_old_driver_without_a_list_of_processes_claims_nothing() -> None:
    class Old(FakeNvml):
        def __getattribute__(self, name: str) -> Any:
            if "Processes" in name:
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert window(NvmlMonitor(nvml=Old(), clock=Clock()), Clock(), 0.0).source == "nvml"
