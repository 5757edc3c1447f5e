"""The energy counters of CPU packages and their memory (RAPL), which Linux shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zeus_plugins.energy.counters import MICRO, CounterMonitor, Found
from zeus_plugins.energy.estimate import cpu_model_name
from zeus_plugins.energy.monitor import (
    DEFAULT_ESTIMATED_POWER_W,
    Choice,
    EnergyUnavailableError,
    MonitorRequest,
    NoPowerLimitError,
    warn_once,
)
from zeus_plugins.energy.processes import gpu_is_used

POWERCAP = Path("/sys/class/powercap")
RAPL_INTERVAL_S = 10.0

_NO_GPU = "without the GPU that the training uses"

# The watts that a package or its memory draws at most; firmware states higher limits where it limits nothing.
_MOST_PACKAGE_W, _MOST_MEMORY_W = 1000.0, 500.0


def probe(request: MonitorRequest, root: Path = POWERCAP) -> Choice | None:
    """Choose a monitor of the CPU packages, unless the training uses a GPU; see `Probe`."""
    if request.trains_on_gpu:
        return None
    return request.choice(partial(RaplMonitor, root=root))


class RaplMonitor(CounterMonitor):
    """An `EnergyMonitor` over this machine's CPU packages and, if counted, their memory.

    `gpus` describes the packages. The energy includes everything that runs on the machine. Four other domains are left
    out: ``core`` and ``uncore`` are parts of a package, ``psys`` is the whole machine, and ``intel-rapl-mmio`` repeats
    the packages.

    The counters wrap: at 300 W, a range of 262 kJ lasts 15 minutes. A thread reads them every 10 s while a window is
    open, so that no wrap is missed at a power below range / 10 s (6.5 kW for a range of 65 kJ).

    Args:
        max_power_w: Summed maximum power in watts. None: the sum of the long-term power limits, which Intel's packages
            state and AMD's do not.

    Raises:
        EnergyUnavailableError: On first use: no RAPL counters, or no permission to read them. From `gpus`: the packages
            state no power limit, and `max_power_w` is None.
    """

    def __init__(
        self,
        *,
        root: Path = POWERCAP,
        max_power_w: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("rapl", partial(_packages, root, max_power_w), clock, RAPL_INTERVAL_S, max_power_w)


def _packages(root: Path, max_power_w: float | None) -> Found:
    zones = open_zones(root, max_power_w)
    return Found(
        zones, sum(zone.is_package for zone in zones), cpu_model_name(), lambda _own: [_NO_GPU] if gpu_is_used() else []
    )


@dataclass
class Zone:
    """The power zone of one package or of its memory."""

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
        """True for a package, False for memory."""
        return self.name.startswith("package")

    @property
    def _most_w(self) -> float:
        return _MOST_PACKAGE_W if self.is_package else _MOST_MEMORY_W

    @property
    def max_power_w(self) -> float:
        """The stated power in watts, else the long-term power limit; 0 for memory without a limit."""
        if self.stated_power_w is not None:
            return self.stated_power_w
        limits_w = self._limits_w(0)
        if self.is_package and not limits_w:
            raise NoPowerLimitError(f"{self} states no power limit: pass RaplMonitor(max_power_w=...)")
        return limits_w[0] if limits_w else 0.0

    @property
    def peak_power_w(self) -> float:
        """The highest limit of the long or the short term, at least 65 W, as a laptop on battery lowers its limits."""
        limits_w = [*self._limits_w(0), *self._limits_w(1)] or [self._most_w]
        return max(*limits_w, self.stated_power_w or 0.0, DEFAULT_ESTIMATED_POWER_W)

    @property
    def longest_gap_s(self) -> float:
        """Seconds in which the counter wraps at most once."""
        return self.range_uj / MICRO / self.peak_power_w

    def _limits_w(self, constraint: int) -> list[float]:
        limits_w = []
        for limit in ("max_power", "power_limit"):
            with suppress(OSError, ValueError):
                limits_w.append(_number(self.folder / f"constraint_{constraint}_{limit}_uw") / MICRO)
        return [limit_w for limit_w in limits_w if 0 < limit_w <= self._most_w]

    def energy_uj(self) -> int:
        """Return the microjoules since the first reading, corrected for at most one wrap between readings."""
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
    """Find the zones that count energy.

    If a package cannot be read or its counter is 0, raise `EnergyUnavailableError`; in this case, leave memory out with
    a warning.
    """
    named = [(path.parent, path.read_text(encoding="utf-8").strip()) for path in sorted(root.glob("intel-rapl:*/name"))]
    packages = [(folder, name) for folder, name in named if name.startswith("package")]
    if not packages:
        raise EnergyUnavailableError(f"no CPU package counts its energy in {root} (RAPL)")
    memory = [(folder, name) for folder, name in named if name.startswith("dram")]
    zones = []
    for folder, name in packages + memory:
        # The stated power is the packages' sum; its split among them matters only if a counter stops.
        is_package = (folder, name) in packages
        share_w = None if max_power_w is None else max_power_w / len(packages) if is_package else 0.0
        try:
            zones.append(_open_zone(folder, name, share_w))
        except EnergyUnavailableError as unavailable:
            if is_package:
                raise
            warn_once(f"the energy of memory is left out: {unavailable.cause}")
    return tuple(zones)


def _open_zone(folder: Path, name: str, share_w: float | None) -> Zone:
    try:
        zone = Zone(folder, name, _number(folder / "max_energy_range_uj"), share_w)
        counts = _number(folder / "energy_uj") > 0
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    if not counts:  # as in some virtual machines
        raise EnergyUnavailableError(f"{folder / 'energy_uj'} stands at 0")
    return zone


def _unreadable(folder: Path, error: Exception) -> EnergyUnavailableError:
    if isinstance(error, PermissionError):
        return EnergyUnavailableError(
            f"only root may read {folder / 'energy_uj'} (RAPL); `sudo chmod a+r {folder.parent}/intel-rapl:*/energy_uj`"
            " lets everybody, until the next start of the machine"
        )
    return EnergyUnavailableError(f"{folder} (RAPL) cannot be read: {error}")


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
