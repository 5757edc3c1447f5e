"""Power limits for a training to search: a pretended device's, or the GPU's own, which nobody sets unasked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeus_plugins.energy.nvml_gpus import Nvml
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitUnavailableError, find_devices
from zeus_plugins.testing import ReplayMachine, ReplayPoint

REPLAY, READ, SET = "replay", "read", "set"
"""A pretended device; the GPU's limits read and none set, as without permission; the GPU's limits set."""

# Time falls and power rises with the limit: half the energy and half the time are cheapest at 400 W.
_TABLE = {
    300.0: ReplayPoint(0.140, 290.0),
    400.0: ReplayPoint(0.105, 385.0),
    500.0: ReplayPoint(0.101, 480.0),
    600.0: ReplayPoint(0.100, 560.0),
    700.0: ReplayPoint(0.100, 600.0),
}
REPLAY_LIMIT_W = 400.0
"""The limit that a search of the pretended device finds, watts."""


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the best limit: arguments of the callback, and what each step calls with its batch, if anything."""

    arguments: dict[str, Any]
    step: Callable[[int], object] | None = None


def power_limits_of(mode: str, nvml: Nvml | None = None) -> Search:
    """The search in one of the modes `REPLAY`, `READ` and `SET`."""
    if mode == REPLAY:
        machine = ReplayMachine(_TABLE)
        windows = {"warmup_steps": 1, "profile_steps": 2, "limits_w": sorted(_TABLE, reverse=True)}
        return Search(
            {"devices": machine.devices, "energy_monitor": machine.monitor, **windows}, lambda _: machine.train()
        )
    devices = find_devices(nvml=nvml)
    return Search({"devices": devices if mode == SET else [ReadOnly(device) for device in devices]})


class ReadOnly:
    """A GPU's power limit that this process does not set, as if it were not permitted to.

    Args:
        device: The GPU.
    """

    outlives_process = False

    def __init__(self, device: PowerLimitDevice) -> None:
        self._device = device

    def __str__(self) -> str:
        return str(self._device)

    def range_w(self) -> tuple[float, float]:
        """See `PowerLimitDevice.range_w`."""
        return self._device.range_w()

    def limit_w(self) -> float:
        """See `PowerLimitDevice.limit_w`."""
        return self._device.limit_w()

    def set_limit_w(self, limit_w: float) -> None:
        """Refuses every limit, the one in force included."""
        raise PowerLimitUnavailableError(f"{self}: {limit_w:g} W was not set, as --set-power-limits was not given")
