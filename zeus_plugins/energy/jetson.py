"""NVIDIA Jetson modules, by the INA3221 power sensors that Linux shows under /sys/class/hwmon."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.energy.integrated import SAMPLE_INTERVAL_S, IntegratedPower, IntegratedPowerMonitor
from zeus_plugins.energy.monitor import EnergyUnavailableError, NoPowerLimitError
from zeus_plugins.protocol import GpuConfig

HWMON = Path("/sys/class/hwmon")

MODEL = Path("/proc/device-tree/model")

_SENSOR = "ina3221"

# Where a module measures its whole input, that is all of it. Where it does not (AGX Orin), its rails are added up,
# without the one that another of them feeds.
_WHOLE = ("VDD_IN", "POM_5V_IN")
_PARTS_OF_OTHERS = ("VDDQ_VDD2_1V8AO",)


class JetsonMonitor(IntegratedPowerMonitor):
    """An `EnergyMonitor` over the power rails of a Jetson module, read every 0.1 s while a window is open.

    GPU, CPU and memory share the module and count together, with everything that runs on it.

    Args:
        root: Where Linux shows its sensors.
        max_power_w: The most that the module draws, in watts: no sensor tells it.
        model: The file with the module's name.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: there is no such sensor. From `gpus`: nobody states the power.
    """

    def __init__(
        self,
        *,
        root: Path = HWMON,
        max_power_w: float | None = None,
        model: Path = MODEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("jetson rails", clock, SAMPLE_INTERVAL_S)
        self._root = root
        self._max_power_w = max_power_w
        self._model = model

    def _find(self) -> tuple[Sequence[IntegratedPower], Callable[[], GpuConfig]]:
        module = _Module(_text(self._model).rstrip("\0") or "Jetson", _open_rails(self._root), self._max_power_w)

        def describe() -> GpuConfig:
            return GpuConfig(max_power=module.max_power_w, number_of_gpus=1, gpu_model=module.name)

        return self._integrated([module]), describe


@dataclass(frozen=True)
class _Rail:
    """One input of a sensor: millivolts and milliamperes."""

    label: str
    voltage: Path
    current: Path

    def power_w(self) -> float:
        try:
            return int(_text(self.voltage)) * int(_text(self.current)) / 1e6
        except ValueError as error:
            raise EnergyUnavailableError(f"the power rail {self.label} cannot be read: {error}") from error


@dataclass(frozen=True)
class _Module:
    name: str
    rails: Sequence[_Rail]
    stated_power_w: float | None

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(rail.label for rail in self.rails)})"

    @property
    def max_power_w(self) -> float:
        if self.stated_power_w is None:
            raise NoPowerLimitError(f"{self} gives no power limit")
        return self.stated_power_w

    def power_w(self) -> float:
        return sum(rail.power_w() for rail in self.rails)


def _open_rails(root: Path) -> Sequence[_Rail]:
    """The rails that make up the module, each once."""
    rails = []
    for sensor in sorted(root.glob("*/name")):
        if _text(sensor).startswith(_SENSOR):
            rails += [
                _Rail(_text(label), label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input"))
                for label in sorted(sensor.parent.glob("in*_label"))
                if label.with_name(f"curr{(number := label.name[2:-6])}_input").exists()
            ]
    whole = [rail for rail in rails if rail.label in _WHOLE]
    counted = whole[:1] or [rail for rail in rails if rail.label not in _PARTS_OF_OTHERS]
    if not whole and not any("GPU" in rail.label for rail in counted):  # none, or a sensor of another board
        raise EnergyUnavailableError(f"there is no power sensor {_SENSOR} of a Jetson module in {root}")
    return counted


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
