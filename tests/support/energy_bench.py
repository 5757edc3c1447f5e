"""What the tests of energy share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.energy.auto import _warn_once

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZEUS_ESTIMATED_POWER_W",
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable chooses a GPU or states watts, and no warning was given before."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    _warn_once.cache_clear()
    yield
    _warn_once.cache_clear()


def spent_j(monitor: EnergyMonitor, spend: Callable[[], None]) -> float:
    """What a monitor measures while something spends."""
    monitor.begin_window("window")
    spend()
    return monitor.end_window("window").energy_j
