"""The CPU's packages and memory, by the counters of RAPL (Intel, and AMD since Zen) as Linux shows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.estimate import cpu_model_name
from zeus_plugins.energy.monitor import EnergyUnavailableError
from zeus_plugins.protocol import GpuConfig

POWERCAP = Path("/sys/class/powercap")

SAMPLE_INTERVAL_S = 10.0


class RaplMonitor(CounterMonitor):
    """An `EnergyMonitor` over this machine's CPU packages and, where it is counted, their memory.

    The packages are described in the place of GPUs. Everything that runs on the machine counts, not this training
    alone. The domains ``core`` and ``uncore`` are parts of a package and ``psys`` is the whole machine, so they are
    left out, and so are the same packages' twins at ``intel-rapl-mmio``.

    The counters wrap: at 300 W, one that ranges to 262 kJ does so every 15 minutes. A thread reads them every 10 s
    while a window is open, which misses nothing as long as a package draws less than its range / 10 s (6.5 kW where
    the range is 65 kJ). A wrap itself is off by at most one unit of the counter, 61 µJ on most machines.

    Args:
        root: Where Linux shows power zones.
        max_power_w: The most that they draw together, in watts. None: the sum of their long-term power limits, which
            Intel's packages state and AMD's do not.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no such counters, or this user may not read them. From `gpus`: the
            packages state no power limit, and nobody else does.
    """

    def __init__(
        self,
        *,
        root: Path = POWERCAP,
        max_power_w: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("rapl", clock, SAMPLE_INTERVAL_S)
        self._root = root
        self._max_power_w = max_power_w

    def _find(self) -> tuple[Sequence[Zone], Callable[[], GpuConfig]]:
        zones = open_zones(self._root, self._max_power_w)
        return zones, lambda: GpuConfig(
            max_power=sum(zone.max_power_w for zone in zones),
            number_of_gpus=sum(zone.is_package for zone in zones),
            gpu_model=cpu_model_name(),
        )


@dataclass
class Zone:
    """One package, or its memory."""

    folder: Path
    name: str
    range_uj: int
    stated_power_w: float | None
    _latest_uj: int | None = None
    _total_uj: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.folder.name})"

    @property
    def is_package(self) -> bool:
        """True for a package, false for memory."""
        return self.name.startswith("package")

    @property
    def max_power_w(self) -> float:
        """The stated power, else its long-term limit; for memory, which often has none, 0."""
        if self.stated_power_w is not None:
            return self.stated_power_w
        for limit in ("constraint_0_max_power_uw", "constraint_0_power_limit_uw"):
            try:
                limit_uw = _number(self.folder / limit)
            except (OSError, ValueError):
                continue
            if limit_uw > 0:
                return limit_uw / MICRO
        if self.is_package:
            raise EnergyUnavailableError(f"{self} states no power limit: pass RaplMonitor(max_power_w=...)")
        return 0.0

    def energy_uj(self) -> int:
        """Microjoules since the first reading, through wraps that were not missed."""
        try:
            reading_uj = _number(self.folder / "energy_uj")
        except (OSError, ValueError) as error:
            raise _unreadable(self.folder, error) from error
        if self._latest_uj is not None:
            wrapped_uj = self.range_uj if reading_uj < self._latest_uj else 0
            self._total_uj += reading_uj - self._latest_uj + wrapped_uj
        self._latest_uj = reading_uj
        return self._total_uj


def open_zones(root: Path, max_power_w: float | None) -> tuple[Zone, ...]:
    """Find what counts, and make sure that it can be read and counts at all."""
    named = [(folder, _text(folder / "name")) for folder in sorted(root.glob("intel-rapl:*"))]
    packages = [(folder, name) for folder, name in named if name.startswith("package")]
    if not packages:
        raise EnergyUnavailableError(f"no CPU package counts its energy in {root} (RAPL)")
    memory = [(folder, name) for folder, name in named if name.startswith("dram")]
    zones = []
    for folder, name in packages + memory:
        # What is stated holds for all of them together; how it is spread matters only where counters stand still.
        share_w = None if max_power_w is None else max_power_w / len(packages) if (folder, name) in packages else 0.0
        try:
            zone = Zone(folder, name, _number(folder / "max_energy_range_uj"), share_w)
            counts = _number(folder / "energy_uj") > 0
        except (OSError, ValueError) as error:
            raise _unreadable(folder, error) from error
        if not counts:  # as in virtual machines whose host keeps it to itself
            raise EnergyUnavailableError(f"{folder / 'energy_uj'} stands at 0")
        zones.append(zone)
    return tuple(zones)


def _unreadable(folder: Path, error: Exception) -> EnergyUnavailableError:
    if isinstance(error, PermissionError):
        return EnergyUnavailableError(
            f"only root may read {folder / 'energy_uj'} (RAPL); `sudo chmod a+r {folder.parent}/intel-rapl:*/energy_uj`"
            " lets everybody, until the next start of the machine"
        )
    return EnergyUnavailableError(f"{folder} (RAPL) cannot be read: {error}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
