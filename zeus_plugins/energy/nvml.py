"""NVIDIA GPUs, by their own energy counters (NVML, Volta and newer)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from zeus_plugins.energy.monitor import EnergyUnavailableError, Measurement, OpenWindows
from zeus_plugins.energy.visible import VISIBLE_VARIABLE, chosen_indices, shared_counter, visible_devices
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

__all__ = ["Nvml", "NvmlMonitor"]

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
MILLI = 1000

Answer = TypeVar("Answer")


class Nvml(Protocol):
    """The part of `pynvml` (package nvidia-ml-py) that is used here; NVML documents the functions under these names."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: D102, N802  NVML's own name, here and below
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...  # noqa: D102, N802
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...  # noqa: D102, N802
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any) -> Sequence[int]: ...  # noqa: D102, N802


class NvmlMonitor:
    """An `EnergyMonitor` over the visible NVIDIA GPUs.

    The driver is first asked when `gpus` or `begin_window` is called; ``CUDA_VISIBLE_DEVICES`` is read then, too. Its
    indices are taken to count by PCI bus, so a machine with GPUs of several models has to set
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` for CUDA to count in the same way.

    Args:
        device_indices: Which of the visible GPUs train, counting from 0. None: all of them.
        nvml: What to call instead of the installed `pynvml`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, or a GPU without a counter of its own.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or one that was named does not exist.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._nvml = nvml
        self._clock = clock
        self._opened: tuple[_Gpu, ...] | None = None
        self._windows: OpenWindows[_Reading] = OpenWindows()

    @property
    def source(self) -> str:
        """``"nvml"``."""
        return "nvml"

    def gpus(self) -> GpuConfig:
        """Describe the GPUs; their maximum power is the sum of the highest limits that can be set, in watts."""
        gpus = self._gpus()
        return GpuConfig(
            max_power=sum(gpu.max_power_w for gpu in gpus),
            number_of_gpus=len(gpus),
            gpu_model=gpus[0].name,
        )

    def begin_window(self, name: str) -> None:
        """Start to measure; see `EnergyMonitor.begin_window`."""
        self._windows.open(name, self._read())

    def end_window(self, name: str) -> Measurement:
        """Return the time since the window began and what the GPUs' counters rose by, summed over the GPUs."""
        begin = self._windows.close(name)
        end = self._read()
        return Measurement(
            time_s=end.time_s - begin.time_s,
            energy_j=(end.counter_mj - begin.counter_mj) / MILLI,
            source=self.source,
        )

    def _read(self) -> _Reading:
        counter_mj = sum(gpu.counter_mj() for gpu in self._gpus())
        return _Reading(time_s=self._clock(), counter_mj=counter_mj)

    def _gpus(self) -> tuple[_Gpu, ...]:
        if self._opened is None:
            self._opened = _open_gpus(self._nvml or _installed_nvml(), self._device_indices)
        return self._opened


@dataclass(frozen=True)
class _Reading:
    """All counters at one instant. NVML counts whole millijoules, so sums and differences of them are exact."""

    time_s: float
    counter_mj: int


@dataclass(frozen=True)
class _Gpu:
    """One GPU; `index` counts the visible ones from 0."""

    nvml: Nvml
    handle: Any
    index: int
    name: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        _, max_power_mw = self._ask("power limits", self.nvml.nvmlDeviceGetPowerManagementLimitConstraints)
        return max_power_mw / MILLI

    def counter_mj(self) -> int:
        """Energy in millijoules since the driver was loaded."""
        return self._ask("energy counter", self.nvml.nvmlDeviceGetTotalEnergyConsumption)

    def check_own_counter(self) -> None:
        """Raise unless the counter works and counts for the whole GPU that the job then owns."""
        if self._is_sliced():
            raise shared_counter(str(self))
        self.counter_mj()

    def _is_sliced(self) -> bool:
        try:
            current_mode, _pending_mode = self.nvml.nvmlDeviceGetMigMode(self.handle)
        except self.nvml.NVMLError:  # what does not know the mode (older than Ampere) cannot be in it
            return False
        return bool(current_mode)

    def _ask(self, what: str, question: Callable[[Any], Answer]) -> Answer:
        try:
            return question(self.handle)
        except self.nvml.NVMLError as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error


def _installed_nvml() -> Nvml:
    try:
        import pynvml
    except ImportError as error:
        raise EnergyUnavailableError(f"the package nvidia-ml-py cannot be imported: {error}") from error
    module: Nvml = pynvml
    return module


def _open_gpus(nvml: Nvml, indices: tuple[int, ...] | None) -> tuple[_Gpu, ...]:
    """Start NVML, find the chosen GPUs and make sure that they are alike and that each can be measured."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise EnergyUnavailableError(f"the NVIDIA driver does not answer: {error}") from error
    visible = visible_devices(os.environ.get(VISIBLE_VARIABLE), count)
    gpus = tuple(_open_gpu(nvml, index, visible[index]) for index in chosen_indices(indices, len(visible)))
    _check_alike(gpus)
    if any(isinstance(device, int) for device in visible):
        _check_numbering([_open_gpu(nvml, index, index) for index in range(count)])
    for gpu in gpus:
        gpu.check_own_counter()
    return gpus


def _open_gpu(nvml: Nvml, index: int, device: int | str) -> _Gpu:
    try:
        if isinstance(device, str):
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(device)
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        raise ZeusBSOConfigError(
            f"GPU {device} cannot be opened: {error}. In {VISIBLE_VARIABLE}, name GPUs by their index or by their full"
            " UUID as `nvidia-smi -L` prints it"
        ) from error
    return _Gpu(nvml, handle, index, name.decode() if isinstance(name, bytes) else name)


def _check_alike(gpus: Sequence[_Gpu]) -> None:
    if _models(gpus) > 1:
        raise ZeusBSOConfigError(
            f"the GPUs are of several models ({_listing(gpus)}), and costs measured on them do not compare: choose"
            f" those of one model by device_indices or {VISIBLE_VARIABLE}"
        )


def _check_numbering(machine: Sequence[_Gpu]) -> None:
    """Refuse to guess which GPU an index means: NVML counts by PCI bus, CUDA by speed unless told otherwise."""
    if _models(machine) > 1 and os.environ.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        raise ZeusBSOConfigError(
            f"this machine's GPUs are of several models (by PCI bus: {_listing(machine)}), and CUDA may number them in"
            f" another order than their driver: set {ORDER_VARIABLE}=PCI_BUS_ID or list UUIDs in {VISIBLE_VARIABLE}"
        )


def _models(gpus: Sequence[_Gpu]) -> int:
    return len({gpu.name for gpu in gpus})


def _listing(gpus: Sequence[_Gpu]) -> str:
    return ", ".join(f"{gpu.index} → {gpu.name}" for gpu in gpus)
