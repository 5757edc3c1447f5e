"""An energy monitor that gives out listed measurements."""

from __future__ import annotations

from collections.abc import Iterable

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.errors import ZeusBSOBadOperationError
from zeus_plugins.protocol import GpuConfig


class ReplayMonitor:
    """An `EnergyMonitor` that measures nothing and returns listed measurements in order.

    Args:
        measurements: One for each `end_window` to come, whatever the window's name. Read as needed, so it may be
            endless; the monitor can be pickled if the iterable's iterator can (a list's can, a generator's cannot).
        gpus: The devices that the measurements were made on.
    """

    measures_exactly = True
    source = "replay"  # each measurement keeps the source that it was listed with

    def __init__(self, measurements: Iterable[Measurement], gpus: GpuConfig) -> None:
        self._remaining = iter(measurements)
        self._given_out = 0
        self._gpus = gpus
        self._windows: OpenWindows[None] = OpenWindows()

    def gpus(self) -> GpuConfig:
        """Describe the devices as given."""
        return self._gpus

    def begin_window(self, name: str) -> None:
        """Open a window; see `EnergyMonitor.begin_window`."""
        self._windows.open(name, None)

    def end_window(self, name: str) -> Measurement:
        """Close a window and return the next listed measurement.

        Raises:
            ZeusBSOOperationOrderError: No window of that name is open.
            ZeusBSOBadOperationError: Every listed measurement was given out.
        """
        self._windows.close(name)
        measurement = next(self._remaining, None)
        if measurement is None:
            raise ZeusBSOBadOperationError(
                f"window {name!r} has no measurement left to replay: all {self._given_out} were given out;"
                " list one for each window that is ended"
            )
        self._given_out += 1
        return measurement
