"""Time and energy of trainings, independent of frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from zeus_plugins.energy import EnergyMonitor, EpochMeter, WindowMonitor
from zeus_plugins.placement import Ranks
from zeus_plugins.training.arguments import refuse_unknown
from zeus_plugins.training.port import TrainingMonitor


class EnergyRun:
    """Time and energy of the present or latest training. Only the first process keeps totals; all help to measure.

    Attributes:
        totals: Seconds (time_s) and joules (energy_j) of all epochs that have ended; empty before the first.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._meter: EpochMeter | None = None
        self._monitors: TrainingMonitor | None = None

    def restore(self, state: Mapping[str, float]) -> None:
        """Let the next `begin` continue from the totals in a checkpoint (`state`), or from zero if it is empty."""
        self.totals = dict(state)

    def begin(self, ranks: Ranks, monitor: EnergyMonitor | WindowMonitor | None) -> None:
        """Begin to measure, unless a measurement is open; all processes of the training make this call.

        Args:
            ranks: The processes.
            monitor: Measures the devices of one machine. None: the best monitor.
        """
        if self._monitors is not None:
            return
        self._monitors = monitors = TrainingMonitor(ranks, monitor)
        monitors.synchronize()
        if ranks.rank == 0:
            meter = EpochMeter(monitors.monitor(), self.totals)
            meter.begin()
            self._meter, self.totals = meter, meter.totals

    def end_epoch(self) -> dict[str, float] | None:
        """End an epoch, and return the metrics of `EpochMeter.end_epoch`; None except on the first process.

        All processes make this call, and wait for the work queued on their devices.
        """
        if self._monitors is not None:
            self._monitors.synchronize()
        if self._meter is None:
            return None
        metrics = self._meter.end_epoch()
        self.totals = self._meter.totals
        return metrics

    def state(self) -> dict[str, float]:
        """Return the totals for a checkpoint, including the present, unfinished epoch."""
        return dict(self.totals) if self._meter is None else self._meter.state()

    @property
    def is_measuring(self) -> bool:
        """Whether this is the first process and a measurement is open."""
        return self._meter is not None

    def close(self) -> None:
        """Stop measuring. Safe to call twice; never raises."""
        if self._meter is not None:
            self._meter.end()
            self._meter = None
        if self._monitors is not None:
            self._monitors.close()
            self._monitors = None


class EnergyTotals:
    """Constructor and results of the energy callbacks."""

    def __init__(self, energy_monitor: EnergyMonitor | WindowMonitor | None = None, **unknown: Never) -> None:
        """Keep the arguments; the training begins later.

        Args:
            energy_monitor: Measures energy and time, with the interface of Zeus's `ZeusMonitor` or ours. None: the best
                monitor of this machine.
            **unknown: Not allowed: raises an error that names the right argument.

        Raises:
            ZeusBSOConfigError: An argument is unknown.
        """
        refuse_unknown(type(self), unknown)
        self._energy_monitor = energy_monitor
        self._run = EnergyRun()

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 except on the first process."""
        return self._run.totals.get("time_s", 0.0)

    @property
    def energy_j(self) -> float:
        """Joules of all epochs of the present or latest training; 0 except on the first process."""
        return self._run.totals.get("energy_j", 0.0)
