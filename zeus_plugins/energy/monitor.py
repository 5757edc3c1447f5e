"""The measurement of a window, and the interface of every energy monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

MAX_SOURCE_LENGTH = 255

Reading = TypeVar("Reading")


class EnergyUnavailableError(ZeusBSOConfigError):
    """This machine cannot tell how much energy its accelerators use.

    Attributes:
        cause: Why not, without the remedy that `str()` adds.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.cause}. To estimate the energy as stated watts × time, use EstimateMonitor(power_w=...) instead."


class NoPowerLimitError(EnergyUnavailableError):
    """A device counts its energy and does not tell the most that it draws: somebody has to state that."""


class NoGpuError(EnergyUnavailableError):
    """There is no GPU that a training could use, so that its CPU does the work."""


@dataclass(frozen=True)
class Measurement:
    """The cost of one window.

    Attributes:
        time_s: Its length in seconds, by a monotonic clock.
        energy_j: The joules used in it, summed over all devices.
        source: How the energy was obtained, e.g. ``"nvml"`` or ``"estimate: 65 W stated"``.
    """

    time_s: float
    energy_j: float
    source: str


class EnergyMonitor(Protocol):
    """Measures time and energy between two points of a training.

    Obligations of an implementation:

    * It can be pickled until its first use, because launchers that spawn processes pickle what holds it. Drivers,
      handles and locks are therefore acquired by the first call that needs them, not by the constructor.
    * It never reports an energy that it did not obtain: what cannot be measured raises, or its source says so.
    * Windows are told apart by name, may overlap and nest, and measure independently of each other.

    It may have an attribute ``measures_exactly`` that is true: then windows of any length are exact, as there is no
    counter that moves in steps, and power limits are measured in as few steps as was asked for.

    Obligations of a caller: all calls come from one thread and, once the first window is open, from one process.
    A window ends when `end_window` is called: work that is still queued on a device then belongs to a later window.
    """

    @property
    def source(self) -> str:
        """The way in which the energy is obtained, at most 255 characters. Asking touches no device."""
        ...

    def gpus(self) -> GpuConfig:
        """Describe the devices measured: their model, their number and their summed maximum power in watts.

        Raises:
            ZeusBSOConfigError: The devices cannot be measured, or not together.
        """
        ...

    def begin_window(self, name: str) -> None:
        """Start to measure.

        Args:
            name: Names the window until it ends; free for reuse after that.

        Raises:
            ZeusBSOOperationOrderError: A window of that name is open.
            ZeusBSOConfigError: The devices cannot be measured, or not together.
        """
        ...

    def end_window(self, name: str) -> Measurement:
        """Close a window and return what was used since it began.

        Raises:
            ZeusBSOOperationOrderError: No window of that name is open.
            ZeusBSOConfigError: The devices can no longer be measured.
        """
        ...


class OpenWindows(Generic[Reading]):
    """The open windows of one monitor, each with what the monitor read when it began."""

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}

    def __len__(self) -> int:
        return len(self._readings)

    def open(self, name: str, reading: Reading) -> None:
        """Note that a window begins, unless `refuse_open` raises."""
        self.refuse_open(name)
        self._readings[name] = reading

    def refuse_open(self, name: str) -> None:
        """Make sure that no window of that name is open."""
        if name in self._readings:
            raise ZeusBSOOperationOrderError(
                f"the energy window {name!r} is already open: end it with end_window({name!r}) before beginning it"
                " again, or give the second window another name"
            )

    def close(self, name: str) -> Reading:
        """Forget a window, which must be open, and return what was read when it began."""
        if name not in self._readings:
            opened = ", ".join(repr(known) for known in self._readings) or "none"
            raise ZeusBSOOperationOrderError(
                f"no energy window {name!r} is open (open windows: {opened}): call begin_window({name!r}) first"
            )
        return self._readings.pop(name)
