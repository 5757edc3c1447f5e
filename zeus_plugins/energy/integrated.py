"""Power that is read regularly and integrated over time, for devices without an energy counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.errors import ZeusBSOConfigError

SAMPLE_INTERVAL_S = 0.1

LATE_S = 1.0


class PowerReading(Protocol):
    """A device that tells the power that it draws. `str()` names it for people."""

    @property
    def max_power_w(self) -> float:
        """The most that it draws, in watts."""
        ...

    def power_w(self) -> float:
        """The power that it draws, in watts.

        Raises:
            EnergyUnavailableError: It does not tell.
        """
        ...


class IntegratedPower:
    """An `EnergyCounter` made of power readings: the area below the straight lines between them (trapezoidal rule).

    `late` counts the readings that came more than a second after the one before.
    """

    def __init__(self, gpu: PowerReading, clock: Callable[[], float]) -> None:
        self.late = 0
        self._gpu = gpu
        self._clock = clock
        self._energy_j = 0.0
        self._latest: tuple[float, float] | None = None

    def __str__(self) -> str:
        return str(self._gpu)

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts."""
        return self._gpu.max_power_w

    def energy_uj(self) -> int:
        """Microjoules since the first reading, up to now: each call reads the power and adds what was used since."""
        power_w = self._gpu.power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
            self.late += now_s - then_s > LATE_S
        self._latest = (now_s, power_w)
        return round(self._energy_j * MICRO)


class IntegratedPowerMonitor(CounterMonitor):
    """The base of monitors that read power every `interval_s` seconds while a window is open.

    Where readings came more than a second apart (something held the interpreter), the source of the window says so.

    Raises:
        ZeusBSOConfigError: `interval_s` makes no sense.
    """

    def __init__(self, what: str, clock: Callable[[], float], interval_s: float) -> None:
        if not 0 < interval_s <= LATE_S:
            raise ZeusBSOConfigError(f"interval_s is {interval_s!r}: choose seconds above 0, {LATE_S:g} at most")
        super().__init__(f"{what}, integrated every {interval_s:g} s", clock, interval_s)
        self._late: dict[str, int] = {}
        self._integrals: list[IntegratedPower] = []

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        super().begin_window(name)
        self._late[name] = self._late_readings()

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the energy is the integrated power, summed over all devices."""
        measured = super().end_window(name)
        if self._late_readings() == self._late.pop(name):
            return measured
        return replace(measured, source=f"{measured.source}, with gaps above {LATE_S:g} s")

    def _late_readings(self) -> int:
        return sum(counter.late for counter in self._integrals)

    def _integrated(self, devices: Sequence[PowerReading]) -> Sequence[IntegratedPower]:
        """Counters of devices, each of which tells its power, or this raises."""
        for device in devices:
            device.power_w()
        self._integrals = [IntegratedPower(device, self._clock) for device in devices]
        return self._integrals
