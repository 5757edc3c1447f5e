"""Energy shared with other processes on the GPU, or with the rest of a superchip's module."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.energy_bench import window
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml, FakeNvmlError
from tests.support.power_limit_bench import LIMITS_W, machine, profiler, train
from zeus_plugins.energy import NvmlMonitor, NvmlPowerMonitor
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitSample
from zeus_plugins.protocol import JobView
from zeus_plugins.training.announce import warn_of_scopes

OTHERS = "shared with other processes"


def source_of(gpu: FakeGpu, kind: type[NvmlMonitor] | type[NvmlPowerMonitor] = NvmlMonitor) -> str:
    clock = Clock()
    return window(kind(nvml=FakeNvml([gpu]), clock=clock), clock, 0.0).source


@pytest.mark.parametrize(
    ("pids", "mps_pids", "others"),
    [
        ([], [], 0),
        ([os.getpid()], [], 0),
        ([4_000_001], [], 0),  # a process of another rank, or this process as numbered outside a container
        ([os.getpid(), 4_000_001], [], 1),
        ([4_000_001, 4_000_002, 4_000_003], [], 2),
        ([4_000_001], [os.getpid()], 0),  # MPS's own server
        ([4_000_001], [os.getpid(), 4_000_002], 1),
    ],
    ids=["none told", "alone", "one", "time slicing", "three", "MPS alone", "MPS shared"],
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


@pytest.mark.parametrize("kind", [NvmlMonitor, NvmlPowerMonitor])
@pytest.mark.parametrize(
    ("scopes_mw", "plain_mw", "note"),
    [
        ({0: 400_000, 1: 600_000}, 598_000, ", module scope"),
        ({0: 400_000, 1: 600_000}, 405_000, ", GPU scope"),
        ({0: 400_000, 1: 400_000}, 400_000, ""),
        ({0: 400_000}, 400_000, ""),
        ({}, 400_000, ""),
    ],
    ids=["module", "GPU", "one scope", "no module", "neither"],
)
def test_scope_of_a_superchip_is_named_in_the_source(
    kind: type[NvmlMonitor] | type[NvmlPowerMonitor], scopes_mw: dict[int, int], plain_mw: int, note: str
) -> None:
    gpu = FakeGpu(name="NVIDIA GH200 480GB", power_mw=plain_mw, scopes_mw=scopes_mw)
    assert source_of(gpu, kind).endswith(note)
    assert ("scope" in source_of(gpu, kind)) is bool(note)


def test_scope_and_foreign_processes_are_named_together() -> None:
    gpu = FakeGpu(power_mw=600_000, scopes_mw={0: 400_000, 1: 600_000}, pids=[1, 2])
    assert source_of(gpu) == f"nvml, module scope, {OTHERS}"


@pytest.mark.parametrize(("earlier", "warnings"), [("nvml, GPU scope", 1), ("nvml, module scope", 0), ("", 0)])
def test_power_limits_in_two_scopes_cause_a_warning(
    caplog: pytest.LogCaptureFixture, earlier: str, warnings: int
) -> None:
    where = machine()
    known = PowerLimitProfile(
        gpus=where.monitor.gpus(),
        samples=(PowerLimitSample(limit_w=100.0, steps=1, time_s=2.0, energy_j=160.0, source=earlier),),
    )
    where.monitor.source = "nvml, module scope"
    zeus = profiler(where, warmup_steps=0, profile_steps=1, profile=known)
    train(where, zeus, len(LIMITS_W))
    assert caplog.text.count("do not compare: measure them anew") == warnings
    zeus.close()


def job_of(*sources: str | None) -> JobView:
    trials = [SimpleNamespace(energy_source=source) for source in sources]
    return cast("JobView", SimpleNamespace(trials=trials, job=SimpleNamespace(job_id="mnist-1")))


def test_trials_in_two_scopes_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_scopes(job_of("nvml", None, "nvml, GPU scope", "nvml, GPU scope + estimate"))
    assert caplog.records == []
    warn_of_scopes(job_of("nvml, GPU scope", "2 nodes: nvml, module scope", "nvml, GPU scope"))
    (record,) = caplog.records
    assert "job mnist-1, the energy of 2 is that of the GPUs alone and that of 1 is that of their modules" in (
        record.getMessage()
    )
