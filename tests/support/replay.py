"""An energy monitor that returns listed measurements."""

from __future__ import annotations

from collections.abc import Iterable

from zeus_plugins.energy import Measurement
from zeus_plugins.energy.monitor import OpenWindows
from zeus_plugins.errors import ZeusBSOBadOperationError
from zeus_plugins.protocol import GpuConfig


class ReplayMonitor:
    """An `EnergyMonitor` that returns listed measurements in order.

    Args:
        measurements: One for each `end_window`, whatever the window's name. The iterable may be endless. The monitor
            can be pickled if the iterable's iterator can (a list's can, a generator's cannot).
        gpus: The devices of these measurements.
    """

    source = "replay"  # Each measurement keeps its listed source.

    def __init__(self, measurements: Iterable[Measurement], gpus: GpuConfig) -> None:
        self._remaining = iter(measurements)
        self._given_out = 0
        self._gpus = gpus
        self._windows: OpenWindows[None] = OpenWindows()

    def gpus(self) -> GpuConfig:
        """Return the given devices."""
        return self._gpus

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._windows.open(name, lambda: None)

    def end_window(self, name: str) -> Measurement:
        """Close a window and return the next listed measurement; raise `ZeusBSOBadOperationError` if none is left."""
        self._windows.close(name)
        measurement = next(self._remaining, None)
        if measurement is None:
            raise ZeusBSOBadOperationError(
                f"window {name!r} has no measurement left to replay: all {self._given_out} were given out;"
                " list one for each window that is ended"
            )
        self._given_out += 1
        return measurement
