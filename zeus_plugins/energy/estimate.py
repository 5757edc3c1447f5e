"""A monitor that reads no device: an estimate from stated watts."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

from zeus_plugins.energy.monitor import Measurement, OpenWindows, check_power_w
from zeus_plugins.energy.processes import cpu_time_s, gpu_is_used, reports_cpu_time
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

MAX_MODEL_LENGTH = 255


class EstimateMonitor:
    """An `EnergyMonitor` that estimates energy from a stated power.

    For a training on the CPU, the energy is the stated power of the whole machine at full load, times the CPU time of
    the training's processes, divided by the number of cores; other programs on the machine therefore add nothing. If
    the operating system does not report CPU time, or a GPU does the work, it is the stated power times the time.

    Args:
        power_w: Power of the whole machine at full load, in watts; for GPUs, the power that they draw while training.
        number_of_devices: Number of the devices.
        device_model: Model of the devices. None: the name of this machine's CPU.
        basis: Origin of the watts in a word or two, for the source of each measurement.
        on_cpu: Whether the CPU does the work. None: true if `device_model` is None and PyTorch has started no GPU.

    Raises:
        ZeusBSOConfigError: An argument is out of range.
    """

    def __init__(
        self,
        power_w: float,
        *,
        number_of_devices: int = 1,
        device_model: str | None = None,
        basis: str = "stated",
        on_cpu: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_power_w("power_w", power_w, "the whole machine")
        if number_of_devices < 1:
            raise ZeusBSOConfigError(f"number_of_devices is {number_of_devices!r}: state how many train, 1 or more")
        if device_model is not None and not 1 <= len(device_model) <= MAX_MODEL_LENGTH:
            raise ZeusBSOConfigError(
                f"device_model has {len(device_model)} characters: give a name of 1 to {MAX_MODEL_LENGTH} characters,"
                " or None for the CPU's"
            )
        self._power_w = power_w
        self._number_of_devices = number_of_devices
        self._device_model = device_model
        self._basis = basis
        self._on_cpu = device_model is None if on_cpu is None else on_cpu
        self._asks_torch = on_cpu is None
        self._others: tuple[int, ...] = ()
        self._clock = clock
        self._windows: OpenWindows[tuple[float | None, float]] = OpenWindows()

    def include(self, processes: Collection[int]) -> None:
        """Measure the processes with these ids, such as other ranks on this machine, in addition to the calling one."""
        self._others = tuple(processes)

    @property
    def source(self) -> str:
        """The stated watts and, if the energy is not watts × time, the formula."""
        return self._source(by_cpu_time=self._is_by_cpu_time and reports_cpu_time(self._others))

    @property
    def _is_by_cpu_time(self) -> bool:
        return self._on_cpu and not (self._asks_torch and gpu_is_used())

    def _source(self, *, by_cpu_time: bool) -> str:
        cores = _cores()
        method = f" × CPU time / {cores} core{'s' if cores > 1 else ''}" if by_cpu_time else ""
        return f"estimate: {self._power_w:g} W {self._basis}{method}"

    def gpus(self) -> GpuConfig:
        """Describe the devices as stated, with the stated power as their maximum power."""
        return GpuConfig(
            max_power=self._power_w,
            number_of_gpus=self._number_of_devices,
            gpu_model=self._device_model or cpu_model_name(),
        )

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._windows.open(name, lambda: (cpu_time_s(self._others) if self._on_cpu else None, self._clock()))

    def end_window(self, name: str) -> Measurement:
        """Return the time since the window began, and the energy estimated for it."""
        begun_cpu_s, begun_s = self._windows.close(name)
        time_s = self._clock() - begun_s
        ended_cpu_s = cpu_time_s(self._others) if self._is_by_cpu_time else None
        if begun_cpu_s is None or ended_cpu_s is None:
            return Measurement(time_s, self._power_w * time_s, self._source(by_cpu_time=False))
        busy_s = max(ended_cpu_s - begun_cpu_s, 0.0) / _cores()
        return Measurement(time_s, self._power_w * busy_s, self._source(by_cpu_time=True))


def _cores() -> int:
    """Return the number of cores of the whole machine, because the stated watts are for the whole machine."""
    # PYTHON_CPU_COUNT changes the answer of `os.cpu_count`.
    return os.sysconf("SC_NPROCESSORS_ONLN")


def cpu_model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's CPU, in 1 to 255 characters.

    Without a model name in `cpuinfo` (not on Linux, or many Arm kernels), use the processor or machine type of
    `platform`.
    """
    try:
        model = re.search(r"^model name\s*:(.*\S)", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        model = None
    name = (model[1].strip() if model else "") or platform.processor() or platform.machine() or "unknown CPU"
    return name[:MAX_MODEL_LENGTH]


def board_model(path: Path = Path("/proc/device-tree/model")) -> str:
    """Return the model of this machine's board, as small computers such as Jetson modules state it; else ""."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")[:MAX_MODEL_LENGTH]
    except OSError:
        return ""
