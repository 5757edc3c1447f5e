"""One measurement for all machines (nodes) of a training, independent of the deep-learning framework."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH, EnergyMonitor, Measurement, logger
from zeus_plugins.energy.zeus_monitor import WindowMonitor, as_energy_monitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

_WINDOW = "zeus_node"


class ClusterMonitor:
    """An `EnergyMonitor` on rank 0 that adds up the measurements of the first rank of each node.

    Every rank creates a `ClusterMonitor`, in the process that uses it. The constructor and `synchronize` are collective
    calls: all ranks call them at the same point of the training. `gpus`, `begin_window` and `end_window` are not
    collective; only rank 0 calls them. A window therefore covers rank 0's node up to the window's end, but the other
    nodes only up to the latest `synchronize`. The energy that these nodes use later counts for the window that is open
    at the next `synchronize`. So call `synchronize` right before a window begins or ends. If a node fails to measure,
    its maximum power × time replaces the measurement, and the source says so.

    Args:
        measure: Makes the monitor of this node's devices, on the first rank of each node; None on the other ranks.
        rank: The global rank of this process; rank 0 is the first of its node.
        all_gather: Takes an object and returns the objects of all ranks, in order of rank.

    Raises:
        Exception: On every rank: the error of the first node that cannot measure.
        ZeusBSOConfigError: On every rank: the nodes have GPUs of different models.
    """

    def __init__(
        self,
        measure: Callable[[], EnergyMonitor | WindowMonitor] | None,
        *,
        rank: int,
        all_gather: Callable[[Any], Sequence[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._clock = clock
        self._monitor: EnergyMonitor | None = None
        told: GpuConfig | Exception | None = None
        if measure is not None:
            try:
                self._monitor = as_energy_monitor(measure())
                told = self._monitor.gpus()
            except Exception as error:  # Raised below on all ranks: if one rank raised here, the others would hang.
                told = error
        self._node_gpus: dict[int, GpuConfig] = {}  # by the rank that measures the node
        for each, gpus in enumerate(all_gather(told)):
            if isinstance(gpus, Exception):
                raise gpus
            if gpus is not None:
                self._node_gpus[each] = gpus
        self._gpus = sum_of_nodes(list(self._node_gpus.values()))
        self._others_sources: tuple[str, ...] = ()  # at the latest `synchronize`
        self._others: dict[str, list[tuple[float, str]]] = {}  # by open window: joules of other nodes, and sources
        self._synchronized_s: float | None = None
        self._is_measuring = self._has_warned = False

    @property
    def source(self) -> str:
        """The number of nodes, and the sources of their measurements."""
        own = () if self._monitor is None else (self._monitor.source,)
        return self._joined((*own, *self._others_sources))

    def gpus(self) -> GpuConfig:
        """Describe the devices of all nodes together."""
        return self._gpus

    def synchronize(self) -> None:
        """Send each node's energy since the latest `synchronize` to rank 0; the first call only begins to measure."""
        shares: Sequence[Measurement | None] = self._all_gather(self._share())
        now_s, then_s = self._clock(), self._synchronized_s
        self._synchronized_s = now_s
        if then_s is None:
            return
        found = []
        for rank, gpus in self._node_gpus.items():
            share, power_w = shares[rank], gpus.max_power
            if rank != 0 and share is None:
                source = f"estimate: {power_w:g} W for a node that failed to measure"
                found.append((power_w * (now_s - then_s), source))
            elif share is not None:
                found.append((share.energy_j, share.source))
        self._others_sources = tuple(source for _, source in found)
        for others in self._others.values():
            others += found

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`. Only on rank 0."""
        self._own.begin_window(name)
        self._others[name] = []

    def end_window(self, name: str) -> Measurement:
        """Return the time of the window and the energy of all nodes. Only on rank 0."""
        own = self._own.end_window(name)
        others = self._others.pop(name)
        source = self._joined((own.source, *([source for _, source in others] or self._others_sources)))
        energy_j = own.energy_j + sum(joules for joules, _ in others)
        return Measurement(own.time_s, energy_j, source)

    def close(self) -> None:
        """Stop measuring on this rank; not collective. Never raises, so that it can be called after an error."""
        if self._monitor is None or not self._is_measuring:
            return
        self._is_measuring = False
        try:
            self._monitor.end_window(_WINDOW)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)

    @property
    def _own(self) -> EnergyMonitor:
        if self._rank != 0 or self._monitor is None:
            raise ZeusBSOConfigError(f"this is rank {self._rank}: rank 0 measures for all nodes")
        return self._monitor

    def _share(self) -> Measurement | None:
        """Return the energy of this rank's node since the latest call; None on rank 0, or if it was not measured."""
        if self._rank == 0 or self._monitor is None:
            return None
        measured = None
        try:
            if self._is_measuring:
                self._is_measuring = False
                measured = self._monitor.end_window(_WINDOW)
            self._monitor.begin_window(_WINDOW)
            self._is_measuring = True
        except Exception as error:  # Not raised: the other ranks wait for this rank in a collective call.
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            logger.log(level, "this node's energy cannot be measured, its maximum power is taken instead: %s", error)
        return measured

    def _joined(self, sources: Sequence[str]) -> str:
        return f"{len(self._node_gpus)} nodes: {', '.join(dict.fromkeys(sources))}"[:MAX_SOURCE_LENGTH]


def sum_of_nodes(nodes: Sequence[GpuConfig]) -> GpuConfig:
    """Sum up the devices of several nodes; raise `ZeusBSOConfigError` if their models differ."""
    models = sorted({node.gpu_model for node in nodes})
    if len(models) > 1:
        raise ZeusBSOConfigError(
            f"the nodes' GPUs are of several models ({', '.join(models)}), and costs measured on them do not compare:"
            " train on nodes of one model"
        )
    return GpuConfig(
        max_power=sum(node.max_power for node in nodes),
        number_of_gpus=sum(node.number_of_gpus for node in nodes),
        gpu_model=models[0],
    )
