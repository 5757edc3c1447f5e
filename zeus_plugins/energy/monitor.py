"""The interface of energy monitors and of the probes that find them, and a monitor that survives errors."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from zeus_plugins.energy.processes import gpu_is_used
from zeus_plugins.environment import ESTIMATED_POWER_W
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

DEFAULT_ESTIMATED_POWER_W = 65.0
"""Watts at full load if no power is measured or stated: the usual thermal design power of a desktop CPU."""

MAX_SOURCE_LENGTH = 255

logger = logging.getLogger("zeus_plugins.energy")

Reading = TypeVar("Reading")


@functools.cache  # logs each text once
def warn_once(warning: str) -> None:
    """Log a warning, unless this process has logged it before."""
    logger.warning("%s", warning)


class EnergyUnavailableError(ZeusBSOConfigError):
    """The energy of the devices cannot be read; `cause` is the reason, without the remedy that `str()` adds."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.cause}. To estimate the energy from stated watts, use EstimateMonitor(power_w=...) instead."


def answer_or_none(question: Callable[[], float]) -> float | None:
    """Return the answer of a device, or None if the device gives no answer."""
    try:
        return question()
    except EnergyUnavailableError:
        return None


class NoPowerLimitError(EnergyUnavailableError):
    """A device counts its energy but gives no maximum power, so the user has to state it."""


class NoGpuError(EnergyUnavailableError):
    """No GPU is available to the training, so it runs on the CPU."""


class BrokenDriverError(NoGpuError):
    """The driver of the GPUs is installed, but answers with an error."""


class UnmeasuredGpuError(EnergyUnavailableError):
    """The training uses GPUs that cannot be measured; the attributes describe them for an `EstimateMonitor`."""

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
    """Time and energy of one measurement window.

    Attributes:
        time_s: Length in seconds, by a monotonic clock.
        energy_j: Joules used, summed over all devices.
        source: How the energy was obtained, e.g. ``"nvml"`` or ``"estimate: 65 W stated"``.
    """

    time_s: float
    energy_j: float
    source: str


class EnergyMonitor(Protocol):
    """Measures time and energy between two points of a training.

    An implementation

    * can be pickled until its first use, because launchers that spawn processes pickle its owner. Open drivers, handles
      and locks in the first call that needs them, not in the constructor;
    * never invents an energy: if it cannot measure, it raises an error or names the estimate in `Measurement.source`;
    * keeps windows apart by name. Windows may overlap and nest.

    Optional methods ``begin_window_at_moves`` and ``end_window_at_moves`` wait for updates of the counters while the
    devices are idle, so that the update interval does not matter; the window does not include the wait.

    The caller makes all calls from one thread and, once the first window is open, from one process. A window ends when
    `end_window` is called: work that is still queued on a device belongs to a later window.
    """

    @property
    def source(self) -> str:
        """How the energy is obtained, in at most 255 characters. Reading it touches no device."""

    def gpus(self) -> GpuConfig:
        """Describe the measured devices: model, number and summed maximum power in watts.

        Raises:
            ZeusBSOConfigError: The devices cannot be measured, or cannot be measured together.
        """

    def begin_window(self, name: str) -> None:
        """Open the window `name`; the name is free again after `end_window`.

        Raises:
            ZeusBSOOperationOrderError: A window of this name is open.
            ZeusBSOConfigError: The devices cannot be measured, or cannot be measured together.
        """

    def end_window(self, name: str) -> Measurement:
        """Close a window and return its time and energy.

        Raises:
            ZeusBSOOperationOrderError: No window of this name is open.
            ZeusBSOConfigError: The devices can no longer be measured.
        """


class OpenWindows(Generic[Reading]):
    """The open windows of a monitor, each with the monitor's reading at its start."""

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}

    def __len__(self) -> int:
        return len(self._readings)

    def open(self, name: str, read: Callable[[], Reading]) -> None:
        """Add a window with the result of `read()`; raise `ZeusBSOOperationOrderError` if it is already open."""
        if name in self._readings:
            raise ZeusBSOOperationOrderError(
                f"the energy window {name!r} is already open: end it with end_window({name!r}) before beginning it"
                " again, or give the second window another name"
            )
        self._readings[name] = read()

    def close(self, name: str) -> Reading:
        """Remove a window and return its reading; raise `ZeusBSOOperationOrderError` if it is not open."""
        if name not in self._readings:
            opened = ", ".join(repr(known) for known in self._readings) or "none"
            raise ZeusBSOOperationOrderError(
                f"no energy window {name!r} is open (open windows: {opened}): call begin_window({name!r}) first"
            )
        return self._readings.pop(name)


@dataclass(frozen=True)
class Choice:
    """An unused monitor, the reasons why no preferred monitor was chosen, and a warning if it is less exact."""

    monitor: EnergyMonitor
    causes: tuple[str, ...] = ()
    warning: str | None = None


@dataclass(frozen=True)
class MonitorRequest:
    """The arguments of `zeus_plugins.energy.auto`, and `gpu_is_seen` if a probe found GPUs that it cannot measure."""

    device_indices: Sequence[int | str] | None = None
    estimated_power_w: float | None = None
    gpu_is_seen: bool = False

    @property
    def uses_no_gpu(self) -> bool:
        """True if the training states that it uses no GPU."""
        return self.device_indices is not None and not self.device_indices

    @property
    def trains_on_gpu(self) -> bool:
        """True if the training names its GPUs, a probe has found them, or PyTorch has started one."""
        return self.gpu_is_seen or bool(self.device_indices) or (self.device_indices is None and gpu_is_used())

    def choice(self, make: Callable[..., EnergyMonitor]) -> Choice:
        """Choose `make()` or, if the devices give no maximum power, `make` with the stated or default `max_power_w`."""
        try:
            make().gpus()
        except NoPowerLimitError as unavailable:
            power_w = stated_power_w(self.estimated_power_w) or DEFAULT_ESTIMATED_POWER_W
            return Choice(make(max_power_w=power_w), warning=maximum_unknown(unavailable.cause, power_w))
        return Choice(make())

    def counted_or_integrated(
        self, counted: Callable[..., EnergyMonitor], integrated: Callable[..., EnergyMonitor]
    ) -> Choice:
        """Choose `counted`, else `integrated` with a warning; raise `UnmeasuredGpuError` if neither can measure."""
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
"""Chooses a monitor for one kind of device; returns None if the machine has none or the training does not use it.

Raises:
    EnergyUnavailableError: The devices cannot be measured; `UnmeasuredGpuError` if they are GPUs that train.
    ZeusBSOConfigError: The devices cannot be measured together.
"""


def stated_power_w(power_w: float | None = None) -> float | None:
    """Return `power_w`, else the watts in ``ZEUS_ESTIMATED_POWER_W``, else None."""
    return ESTIMATED_POWER_W.number(is_positive=True) if power_w is None else power_w


def maximum_unknown(cause: str, power_w: float) -> str:
    """Return the warning that `power_w` is taken for an unknown maximum power."""
    return (
        f"{cause}: {power_w:g} W is taken for the most that it draws. Set {ESTIMATED_POWER_W} to the watts of its data"
        " sheet (TDP)."
    )


def check_power_w(name: str, power_w: float, of: str) -> None:
    """Raise `ZeusBSOConfigError` unless `power_w`, the value of the argument `name`, is finite and above 0."""
    if not 0 < power_w < math.inf:
        raise ZeusBSOConfigError(
            f"{name} is {power_w!r}: state the watts of {of} at full load, a finite number above 0"
        )


class BridgedMonitor:
    """An `EnergyMonitor` that estimates the windows in which another monitor fails.

    The estimate uses the mean power so far or, before the first measurement, the devices' maximum power; the
    measurement's source says so. The first failure is logged as a warning. Each window tries the monitor again.

    Args:
        monitor: The other monitor.
        strict: If the monitor fails, try it again at once: raise the error if it fails again, otherwise estimate.
        time_s: Seconds measured earlier in this training.
        energy_j: Joules of these seconds.
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
        self.is_failing = False  # since the latest end of a window
        self._failures = 0
        # Each window's start time and its name in the other monitor, or None if the other monitor failed to open it.
        self._windows: OpenWindows[tuple[float, str | None]] = OpenWindows()

    @property
    def source(self) -> str:
        """The source of the other monitor."""
        return self._monitor.source

    def gpus(self) -> GpuConfig:
        """Describe the other monitor's devices."""
        return self._monitor.gpus()

    def begin_window(self, name: str) -> None:
        """Open a window; raise the monitor's error until it has opened one window, and always if `strict`."""
        self._windows.open(name, partial(self._begun, name))

    def _begun(self, name: str) -> tuple[float, str | None]:
        # A window that could not be ended may still be open in the other monitor, so each failure leads to a new name.
        own = f"{name}_{self._failures}" if self._failures else name
        begun_s = self._clock()
        try:
            self._monitor.begin_window(own)
        except Exception as error:
            if self._strict or not self._has_begun:
                raise
            self._note(error)
            return begun_s, None
        self._has_begun = True
        return begun_s, own

    def end_window(self, name: str) -> Measurement:
        """Close a window and return its measured or estimated energy; if `strict`, raise an error that lasts."""
        begun_s, own = self._windows.close(name)
        part = None if own is None else self._measured(own)
        self.is_failing = part is None
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
            if self._strict and not self._works_again(f"{own}_again"):
                raise
            self._note(error)
            return None

    def _works_again(self, name: str) -> bool:
        try:
            self._monitor.begin_window(name)
            self._monitor.end_window(name)
        except Exception as error:
            logger.debug("the monitor fails again: %s", error)
            return False
        return True

    def _latest_power_w(self) -> float | None:
        """Return the mean power so far, else the devices' maximum power, else None."""
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
        level = logging.DEBUG if self._failures else logging.WARNING
        told = f"the energy of the training can no longer be measured ({error})"
        logger.log(level, "%s: the training continues, and until the monitor works again %s", told, taken)
        self._failures += 1
