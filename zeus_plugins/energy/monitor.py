"""The interface of every energy monitor and of the probes that find one, and the monitor that outlives errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeus_plugins.environment import ESTIMATED_POWER_W
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

DEFAULT_ESTIMATED_POWER_W = 65.0
"""Watts assumed where nothing is measured and nobody states better ones.

65 W is the usual thermal design power class of a desktop CPU package (and of a share of a server's): the right order of
magnitude for a training on a CPU, and a convention rather than a measurement.
"""

MAX_SOURCE_LENGTH = 255

logger = logging.getLogger("zeus_plugins.energy")

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
    """A device counts its energy and does not tell the most that it draws: the user has to state that."""


class NoGpuError(EnergyUnavailableError):
    """There is no GPU that a training could use, so that its CPU does the work."""


class UnmeasuredGpuError(EnergyUnavailableError):
    """GPUs train that cannot be measured; the attributes say what their driver tells of them.

    Attributes:
        number: Number of GPUs.
        model: Their model; None: unknown.
        max_power_w: The most that they draw together, in watts; None: unknown.
        basis: Where these watts come from, as in `EstimateMonitor`.
    """

    def __init__(
        self,
        cause: str,
        *,
        number: int = 1,
        model: str | None = None,
        max_power_w: float | None = None,
        basis: str = "",
    ) -> None:
        super().__init__(cause)
        self.number, self.model, self.max_power_w, self.basis = number, model, max_power_w, basis


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

    def gpus(self) -> GpuConfig:
        """Describe the devices measured: their model, their number and their summed maximum power in watts.

        Raises:
            ZeusBSOConfigError: The devices cannot be measured, or not together.
        """

    def begin_window(self, name: str) -> None:
        """Start to measure.

        Args:
            name: Names the window until it ends; free for reuse after that.

        Raises:
            ZeusBSOOperationOrderError: A window of that name is open.
            ZeusBSOConfigError: The devices cannot be measured, or not together.
        """

    def end_window(self, name: str) -> Measurement:
        """Close a window and return what was used since it began.

        Raises:
            ZeusBSOOperationOrderError: No window of that name is open.
            ZeusBSOConfigError: The devices can no longer be measured.
        """


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


@dataclass(frozen=True)
class Choice:
    """An unused monitor, the reasons for which none before it was chosen, and a warning if it is less exact."""

    monitor: EnergyMonitor
    causes: tuple[str, ...] = ()
    warning: str | None = None


@dataclass(frozen=True)
class MonitorRequest:
    """What is known of a training when a monitor is chosen for it.

    Attributes:
        device_indices: As of `zeus_plugins.energy.auto`.
        estimated_power_w: As of `zeus_plugins.energy.auto`.
        gpu_is_seen: An earlier probe found GPUs that train and cannot be measured.
    """

    device_indices: Sequence[int | str] | None = None
    estimated_power_w: float | None = None
    gpu_is_seen: bool = False

    @property
    def uses_no_gpu(self) -> bool:
        """True for a training that says that it uses no GPU."""
        return self.device_indices is not None and not self.device_indices

    @property
    def trains_on_gpu(self) -> bool:
        """True for a training that names its GPUs, whatever their driver says, and where a probe has found them."""
        return self.gpu_is_seen or bool(self.device_indices)

    def choice(self, make: Callable[[float | None], EnergyMonitor]) -> Choice:
        """Choose the monitor that `make` makes, with stated watts if its devices tell no maximum power.

        Args:
            make: Makes a monitor for the most that the devices draw together, in watts; None: the devices tell it.

        Raises:
            EnergyUnavailableError: The devices cannot be measured.
        """
        try:
            make(None).gpus()
        except NoPowerLimitError as unavailable:
            power_w = stated_power_w(self.estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
            warning = (
                f"{unavailable.cause}: {power_w:g} W is taken for the most that it draws. Set {ESTIMATED_POWER_W} to"
                " the watts of its data sheet (TDP)."
            )
            return Choice(make(power_w), warning=warning)
        return Choice(make(None))

    def counted_or_integrated(
        self, counted: Callable[[float | None], EnergyMonitor], integrated: Callable[[float | None], EnergyMonitor]
    ) -> Choice:
        """Choose the monitor over energy counters or, if there are none, over power readings, with a warning.

        Raises:
            UnmeasuredGpuError: The devices have neither.
        """
        try:
            return self.choice(counted)
        except EnergyUnavailableError as unavailable:
            no_counter = unavailable
        try:
            found = self.choice(integrated)
        except EnergyUnavailableError as no_power:
            raise UnmeasuredGpuError(f"{no_counter.cause}; {no_power.cause}") from no_power
        less_exact = f"{no_counter.cause}: energy is integrated from power readings instead, which is less exact."
        return Choice(found.monitor, (no_counter.cause,), found.warning or less_exact)


Probe = Callable[[MonitorRequest], Choice | None]
"""Looks for one kind of device, and chooses a monitor of it; None: there is no such device, or it does not train.

Raises:
    EnergyUnavailableError: The devices cannot be measured; an `UnmeasuredGpuError` if they are GPUs that train.
    ZeusBSOConfigError: The devices cannot be measured together.
"""


def stated_power_w(power_w: float | None = None) -> float | None:
    """Return these watts, else those in the environment variable ``ZEUS_ESTIMATED_POWER_W``, else None."""
    return ESTIMATED_POWER_W.number(is_positive=True) if power_w is None else power_w


class BridgedMonitor:
    """An `EnergyMonitor` that estimates the windows in which another one fails.

    The devices are taken to draw the mean power that was measured before or, before the first measurement, their
    maximum power; the measurement's source says so. One warning tells of the first failure, and each window tries the
    monitor again.

    Args:
        monitor: Measures.
        strict: Estimate only what passes: raise where the monitor fails again at once.
        time_s: Seconds measured before, in the same training.
        energy_j: The joules of that time.
    """

    def __init__(
        self,
        monitor: EnergyMonitor,
        *,
        strict: bool = False,
        time_s: float = 0.0,
        energy_j: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = monitor
        self._strict = strict
        self._time_s, self._energy_j = time_s, energy_j
        self._clock = clock
        self._has_begun = False
        self._failures = 0
        # When each window began, and its name at the other monitor; None where it could not begin there.
        self._windows: OpenWindows[tuple[float, str | None]] = OpenWindows()

    @property
    def source(self) -> str:
        """That of the other monitor."""
        return self._monitor.source

    def gpus(self) -> GpuConfig:
        """Describe the other monitor's devices."""
        return self._monitor.gpus()

    def begin_window(self, name: str) -> None:
        """Start to measure; see `EnergyMonitor.begin_window`.

        Raises:
            Exception: What the monitor raises, in its first window and where it is `strict`.
        """
        self._windows.refuse_open(name)
        # Another one after each failure: one that could not be ended may still be open.
        own: str | None = f"{name}_{self._failures}" if self._failures else name
        begun_s = self._clock()
        try:
            self._monitor.begin_window(own or name)
        except Exception as error:
            if self._strict or not self._has_begun:
                raise
            self._note(error)
            own = None
        self._has_begun = True
        self._windows.open(name, (begun_s, own))

    def end_window(self, name: str) -> Measurement:
        """Return what was used since the window began, measured or estimated; see `EnergyMonitor.end_window`.

        Raises:
            ZeusBSOOperationOrderError: No window of that name is open.
            Exception: What the monitor raises, where it is `strict` and the monitor cannot go on either.
        """
        begun_s, own = self._windows.close(name)
        part = None if own is None else self._measured(own)
        if part is None:
            time_s, power_w = self._clock() - begun_s, self._latest_power_w()
            basis = "unknown, so 0 J" if power_w is None else f"estimate: {power_w:g} W"
            part = Measurement(time_s, (power_w or 0.0) * time_s, f"{basis}, as it cannot be measured")
        self._time_s += part.time_s
        self._energy_j += part.energy_j
        return part

    def _measured(self, own: str) -> Measurement | None:
        try:
            return self._monitor.end_window(own)
        except Exception as error:
            if self._strict and not self._goes_on(f"{own}_again"):
                raise
            self._note(error)
            return None

    def _goes_on(self, name: str) -> bool:
        try:
            self._monitor.begin_window(name)
            self._monitor.end_window(name)
        except Exception as error:
            logger.debug("the monitor fails again: %s", error)
            return False
        return True

    def _latest_power_w(self) -> float | None:
        """The mean power up to now, else the most that the devices draw; None where neither is known."""
        if self._time_s > 0 and self._energy_j > 0:
            return self._energy_j / self._time_s
        try:
            return self._monitor.gpus().max_power
        except Exception as error:
            logger.debug("the devices' maximum power is not known either: %s", error)
            return None

    def _note(self, error: Exception) -> None:
        power_w = self._latest_power_w()
        unknown = "its energy counts for nothing, as its power is not known"
        taken = unknown if power_w is None else f"it is taken to draw {power_w:g} W"
        logger.log(
            logging.DEBUG if self._failures else logging.WARNING,
            "the energy of the training cannot be measured any more (%s): the training goes on, and until it can be "
            "measured again %s",
            error,
            taken,
        )
        self._failures += 1
