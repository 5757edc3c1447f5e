"""Adapters for monitors with the interface of Zeus's `ZeusMonitor`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, cast

from zeus_plugins.energy.counters import STANDSTILL_S, UNKNOWN_PEAK_W, UPDATE_S
from zeus_plugins.energy.estimate import board_model, cpu_model_name
from zeus_plugins.energy.monitor import (
    DEFAULT_ESTIMATED_POWER_W,
    EnergyMonitor,
    EnergyUnavailableError,
    Measurement,
    NoGpuError,
    OpenWindows,
    logger,
    maximum_unknown,
    stated_power_w,
    warn_once,
)
from zeus_plugins.energy.nvml import MILLI, Nvml, NvmlMonitor, check_one_model
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig


class WindowMonitor(Protocol):
    """The interface of Zeus's monitors.

    The result of `end_window` has the seconds in `time`. The joules are in `total_energy` or, by device, in the mapping
    `gpu_energy`. If no GPU was measured, they are in `cpu_energy` and `dram_energy`, or in `soc_energy` (a system on a
    chip: Jetson, Apple).
    """

    def begin_window(self, name: str, /) -> None:
        """Open a window."""

    def end_window(self, name: str, /) -> Any:
        """Close a window and return its cost."""


class ZeusMonitorAdapter:
    """An `EnergyMonitor` over a `WindowMonitor`; it can be pickled if `monitor` can.

    If a window's energy is negative or not finite, is 0 J in a second or more, or is above twice the maximum power (at
    least 1 kW) × time, it is estimated as maximum power × time, and the measurement's source says so.

    Args:
        monitor: The monitor with Zeus's interface.
        gpus: The measured devices. None: ask NVML for the monitor's `gpu_indices`, or for all visible GPUs; on machines
            without NVIDIA GPUs, ask the monitor, as Zeus knows AMD GPUs.
    """

    def __init__(self, monitor: WindowMonitor, gpus: GpuConfig | None = None, *, nvml: Nvml | None = None) -> None:
        self._monitor = monitor
        self._gpus = gpus
        self._nvml = nvml
        self._windows: OpenWindows[None] = OpenWindows()

    @property
    def source(self) -> str:
        """The name of the monitor's class, for example ``"ZeusMonitor"``."""
        return type(self._monitor).__name__[:100]

    def gpus(self) -> GpuConfig:
        """Describe the devices as given, by NVML or by Zeus; raise `ZeusBSOConfigError` if none of them can."""
        if self._gpus is None:
            indices = getattr(self._monitor, "gpu_indices", None)
            try:
                self._gpus = NvmlMonitor(indices, nvml=self._nvml).gpus()
            except ZeusBSOConfigError as error:
                self._gpus = _described_by_zeus(self._monitor) if isinstance(error, NoGpuError) else None
                if self._gpus is not None:
                    return self._gpus
                cause = error.cause if isinstance(error, EnergyUnavailableError) else error
                raise ZeusBSOConfigError(
                    f"which devices does the {self.source} measure? NVML cannot say ({cause}): pass"
                    " ZeusMonitorAdapter(monitor, gpus=GpuConfig(max_power=..., number_of_gpus=..., gpu_model=...))"
                ) from error
        return self._gpus

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._windows.open(name, partial(self._monitor.begin_window, name))

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; raise `ZeusBSOConfigError` if the answer lacks the time or the energy."""
        self._windows.close(name)
        answer = self._monitor.end_window(name)
        time_s, energy_j = _number(getattr(answer, "time", None)), _energy_j(answer)
        if time_s is None or energy_j is None or not math.isfinite(time_s) or time_s < 0:
            raise ZeusBSOConfigError(
                f"{self.source}.end_window returned {answer!r}: it has to have the seconds in `time`, and the joules in"
                " `total_energy` or `gpu_energy`"
            )
        peak_w = math.inf if self._gpus is None else max(self._gpus.max_power, UNKNOWN_PEAK_W)
        if 0 < energy_j < 2 * peak_w * (time_s + UPDATE_S) or (energy_j == 0 and time_s < STANDSTILL_S):
            return Measurement(time_s, energy_j, self.source)
        power_w = self.gpus().max_power
        source = f"{self.source}, but estimate: {power_w:g} W, for it measured {energy_j:g} J"
        logger.warning("%s × time (window %r)", source, name)
        return Measurement(time_s, power_w * time_s, source)


def as_energy_monitor(monitor: EnergyMonitor | WindowMonitor) -> EnergyMonitor:
    """Return an energy monitor unchanged, or adapt one with Zeus's interface; otherwise raise `ZeusBSOConfigError`."""
    # The attribute `gpus` of ZeusMonitor is no method.
    if callable(getattr(monitor, "gpus", None)) and hasattr(monitor, "source"):
        return cast("EnergyMonitor", monitor)
    if all(callable(getattr(monitor, method, None)) for method in ("begin_window", "end_window")):
        return ZeusMonitorAdapter(cast("WindowMonitor", monitor))
    raise ZeusBSOConfigError(
        f"{type(monitor).__name__} is no energy monitor: it has no begin_window(name) and end_window(name)"
    )


def _described_by_zeus(monitor: Any) -> GpuConfig | None:
    """Describe the devices of a monitor on a machine without NVIDIA GPUs; return None if Zeus cannot, either.

    They are AMD GPUs, or a system on a chip, whose maximum power no driver states.
    """
    if getattr(monitor, "soc_is_present", False):
        model, power_w = board_model() or cpu_model_name(), stated_power_w()
        if power_w is None:
            power_w = DEFAULT_ESTIMATED_POWER_W
            warn_once(maximum_unknown(f"{model} gives no power limit", power_w))
        return GpuConfig(max_power=power_w, number_of_gpus=1, gpu_model=model)
    try:
        indices, gpus = list(monitor.gpu_indices), monitor.gpus
        names = [str(gpus.get_name(index)) for index in indices]
        max_power_w = sum(gpus.get_power_management_limit_constraints(index)[1] for index in indices) / MILLI
    except Exception as error:
        logger.debug("%s cannot describe its devices: %s", type(monitor).__name__, error)
        return None
    if not names or max_power_w <= 0:
        return None
    check_one_model(names, ", ".join(names))
    return GpuConfig(max_power=max_power_w, number_of_gpus=len(names), gpu_model=names[0])


# Disjoint parts of a system on a chip, in millijoules: first Apple's, then Jetson's.
_SOC_PARTS = ("cpu_total_mj", "dram_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "cpu_energy_mj", "gpu_energy_mj")


def _energy_j(answer: object) -> float | None:
    """Return the joules of an answer, summed over the devices; None if it has none."""
    parts = [getattr(answer, name, None) for name in ("gpu_energy", "cpu_energy", "dram_energy")]
    gpu_j, *cpu_j = (_number(sum(part.values())) if isinstance(part, Mapping) and part else None for part in parts)
    if gpu_j is None and any(joules is not None for joules in cpu_j):
        return sum(joules or 0.0 for joules in cpu_j)
    # A system on a chip has a total (Jetson) or disjoint parts (Apple).
    for names in (("total_energy_mj",), _SOC_PARTS):
        told_mj = [_number(getattr(getattr(answer, "soc_energy", None), name, None)) for name in names]
        known_mj = [each_mj for each_mj in told_mj if each_mj is not None]
        if gpu_j is None and known_mj:
            return sum(known_mj) / 1000
    total_j = _number(getattr(answer, "total_energy", None))
    return gpu_j if total_j is None else total_j


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
