"""Fixtures and functions shared by the tests of energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.fake_nvml import Clock, FakeNvml
from zeus_plugins.energy import EnergyMonitor, Measurement, nvml, rapl
from zeus_plugins.energy.auto import probe_unread
from zeus_plugins.energy.monitor import Probe, warn_once

NOWHERE = Path("/nowhere")

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "ZEUS_ESTIMATED_POWER_W",
    "ZEUS_POWER_LIMIT_COMMAND",
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset variables that choose a GPU, state watts or set limits, and reset the warnings."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def probes_of(
    driver: FakeNvml | None = None,
    *,
    powercap: Path = NOWHERE,
    board: str = "",
    kfd: Path = NOWHERE,
) -> Sequence[Probe]:
    """Return all probes for a machine with these devices; by default, its CPU counter stands still."""
    return [
        partial(nvml.probe, nvml=driver),
        partial(probe_unread, model=board, kfd=kfd),
        partial(rapl.probe, root=powercap),
    ]


def window(monitor: EnergyMonitor, clock: Clock, time_s: float, spend: Callable[[], object] = bool) -> Measurement:
    """Measure a window of `time_s` seconds during which `spend` consumes energy."""
    monitor.begin_window("training")
    clock.now_s += time_s
    spend()
    return monitor.end_window("training")


def spent_j(monitor: EnergyMonitor, spend: Callable[[], object]) -> float:
    """Return the joules that a monitor measures during `spend`."""
    return window(monitor, Clock(), 0.0, spend).energy_j
