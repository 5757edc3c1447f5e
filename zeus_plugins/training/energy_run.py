"""Time and energy of one training after another, decided alike for all frameworks. Knows no framework."""

from __future__ import annotations

from collections.abc import Mapping

from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, EpochMeter, WindowMonitor
from zeus_plugins.energy.meter import Breakdown
from zeus_plugins.placement import placed
from zeus_plugins.training.port import Ranks, cluster_monitor, node_monitor


class EnergyRun:
    """The time and energy of the present or latest training, over all its machines.

    The first of all processes has them; the others take part where several machines are measured together.
    """

    def __init__(self) -> None:
        # Seconds (time_s) and joules (energy_j) of all epochs that have ended; empty before the first.
        self._totals: dict[str, float] = {}
        self._meter: EpochMeter | None = None
        self._cluster: ClusterMonitor | None = None
        self._is_open = False

    @property
    def time_s(self) -> float:
        """Seconds of all epochs that have ended."""
        return self._totals.get("time_s", 0.0)

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._totals.get("energy_j", 0.0)

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the totals from which the next `begin` goes on.

        Args:
            state: As `state` gave it when a checkpoint was written; empty to begin anew.
        """
        self._totals = dict(state)

    def begin(
        self,
        ranks: Ranks,
        monitor: EnergyMonitor | WindowMonitor | None,
        state: Mapping[str, float] | None = None,
    ) -> None:
        """Begin to measure; nothing the second time before `close`.

        Args:
            ranks: The processes of the training, all of which make this call.
            monitor: Measures the devices of one machine. None: the best one that it offers, and the parts of rank 0's
                machine beside it.
            state: As `state` gave it when a checkpoint was written. None: go on from the totals.
        """
        if self._is_open:
            return
        self._is_open = True
        place = placed(ranks)
        self._cluster = cluster_monitor(ranks, place, monitor)
        if self._cluster is not None:
            self._cluster.synchronize()
        if ranks.rank == 0:
            meter = EpochMeter(
                self._cluster or node_monitor(place, monitor),
                self._totals if state is None else state,
                breakdown=Breakdown(place.gpus) if monitor is None else None,
            )
            meter.begin()
            self._meter, self._totals = meter, meter.totals

    def end_epoch(self) -> dict[str, float] | None:
        """End an epoch.

        Returns:
            The metrics of `EpochMeter.end_epoch`; None on other processes than the first.
        """
        if self._cluster is not None:
            self._cluster.synchronize()
        if self._meter is None:
            return None
        metrics = self._meter.end_epoch()
        self._totals = self._meter.totals
        return metrics

    def state(self) -> dict[str, float]:
        """The totals for a checkpoint and, while a training is measured here, what its present epoch has cost."""
        return dict(self._totals) if self._meter is None else self._meter.state()

    @property
    def is_measuring(self) -> bool:
        """True while a training is measured here, by the first of all its processes."""
        return self._meter is not None

    def close(self) -> None:
        """Stop measuring. Safe to call twice; it never raises."""
        self._is_open = False
        if self._meter is not None:
            self._meter.end()
            self._meter = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class EnergyTotals:
    """The constructor and results of the energy callbacks. Each callback's own docstring describes the argument."""

    def __init__(self, energy_monitor: EnergyMonitor | WindowMonitor | None = None) -> None:
        self._energy_monitor = energy_monitor
        self._run = EnergyRun()

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 on other processes than the first."""
        return self._run.time_s

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._run.energy_j
