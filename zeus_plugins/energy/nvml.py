"""NVIDIA GPUs through NVML: by their own energy counters (Volta and newer), or by their power (all that state it)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.energy.monitor import EnergyUnavailableError, NoGpuError
from zeus_plugins.energy.visible import MIG_PREFIX, check_one_model, chosen_indices, shared_counter, visible_devices
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.environment import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES

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
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetAttributes(self, handle: Any) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any) -> Sequence[int]: ...  # noqa: D102, N802


class NvmlMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible NVIDIA GPUs, by their energy counters.

    The driver is first asked when `gpus` or `begin_window` is called; ``CUDA_VISIBLE_DEVICES`` is read then, too. Its
    indices are taken to count by PCI bus, so a machine with GPUs of several models has to set
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` for CUDA to count in the same way.

    The counters move every few tens of milliseconds, so that is how exactly a window's ends are met.

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
        super().__init__("nvml", clock)
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._nvml = nvml

    def _find(self) -> tuple[Sequence[NvmlGpu], Callable[[], GpuConfig]]:
        gpus = open_gpus(self._nvml, self._device_indices)
        for gpu in gpus:
            gpu.energy_uj()  # It has a counter, or this raises.
        return gpus, lambda: describe_gpus(gpus)


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU that the job has to itself; `index` counts the visible ones from 0."""

    nvml: Nvml
    handle: Any
    index: int
    name: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest power limit that can be set, in watts."""
        _, max_power_mw = self._ask("power limits", self.nvml.nvmlDeviceGetPowerManagementLimitConstraints)
        return max_power_mw / MILLI

    def energy_uj(self) -> int:
        """Energy in microjoules since the driver was loaded."""
        return MILLI * self._ask("energy counter", self.nvml.nvmlDeviceGetTotalEnergyConsumption)

    def power_w(self) -> float:
        """The power that the GPU and its memory draw, in watts."""
        return self._ask("power reading", self.nvml.nvmlDeviceGetPowerUsage) / MILLI

    def _ask(self, what: str, question: Callable[[Any], Answer]) -> Answer:
        try:
            return question(self.handle)
        except self.nvml.NVMLError as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error


def describe_gpus(gpus: Sequence[NvmlGpu]) -> GpuConfig:
    """Sum up GPUs of one model."""
    max_power_w = sum(gpu.max_power_w for gpu in gpus)
    return GpuConfig(max_power=max_power_w, number_of_gpus=len(gpus), gpu_model=gpus[0].name)


def open_gpus(nvml: Nvml | None = None, indices: Sequence[int] | None = None) -> tuple[NvmlGpu, ...]:
    """Start NVML, find the chosen GPUs, and make sure that they are alike and that the job has each to itself.

    Raises:
        NoGpuError: No driver answers, or no GPU is visible.
        EnergyUnavailableError: One of them is a slice of a GPU.
        ZeusBSOConfigError: They are of several models, or one that was named does not exist.
    """
    nvml = nvml or installed_nvml()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver does not answer: {error}") from error
    visible = visible_devices(CUDA_VISIBLE_DEVICES.text(), count)
    gpus = tuple(_open_gpu(nvml, index, visible[index]) for index in chosen_indices(indices, len(visible)))
    check_one_model([gpu.name for gpu in gpus], _listing(gpus), CUDA_VISIBLE_DEVICES)
    if any(isinstance(device, int) for device in visible):
        _check_numbering([_open_gpu(nvml, index, index) for index in range(count)])
    for gpu in gpus:
        _check_whole(gpu)
    return gpus


def installed_nvml() -> Nvml:
    """The package `pynvml`."""
    try:
        import pynvml
    except ImportError as error:
        raise NoGpuError(f"the package nvidia-ml-py cannot be imported: {error}") from error
    module: Nvml = pynvml
    return module


def _open_gpu(nvml: Nvml, index: int, device: int | str) -> NvmlGpu:
    try:
        if isinstance(device, str):
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
            if device.startswith(MIG_PREFIX):
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(device)
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        if str(device).startswith(MIG_PREFIX):  # drivers know ids of their own generation only, in two notations
            raise shared_counter(f"{device} in {CUDA_VISIBLE_DEVICES}, of which the driver says {error}") from error
        raise ZeusBSOConfigError(
            f"GPU {device} cannot be opened: {error}. In {CUDA_VISIBLE_DEVICES}, name GPUs by their index or by their"
            " full UUID as `nvidia-smi -L` prints it"
        ) from error
    return NvmlGpu(nvml, handle, index, name.decode() if isinstance(name, bytes) else name)


def _check_whole(gpu: NvmlGpu) -> None:
    """Refuse a GPU that others may use at the same time, for it counts all of them together."""
    try:
        current_mode, _pending_mode = gpu.nvml.nvmlDeviceGetMigMode(gpu.handle)
    except gpu.nvml.NVMLError:  # what does not know the mode (older than Ampere) cannot be in it
        return
    if current_mode and not _is_one_slice(gpu):
        raise shared_counter(str(gpu))


def _is_one_slice(gpu: NvmlGpu) -> bool:
    """True when the first slice, which is the one that CUDA takes, is as large as all of the GPU.

    That there is no other slice says nothing: in a container, NVML hides those of others.
    """
    try:
        whole = gpu.nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)
        for place in range(whole):
            try:
                part = gpu.nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
            except gpu.nvml.NVMLError:  # no slice is at this place
                continue
            return bool(gpu.nvml.nvmlDeviceGetAttributes(part).computeInstanceSliceCount >= whole)
    except gpu.nvml.NVMLError:
        pass
    return False


def _check_numbering(machine: Sequence[NvmlGpu]) -> None:
    """Refuse to guess which GPU an index means: NVML counts by PCI bus, CUDA by speed unless told otherwise."""
    if len({gpu.name for gpu in machine}) > 1 and CUDA_DEVICE_ORDER.text() != "PCI_BUS_ID":
        raise ZeusBSOConfigError(
            f"this machine's GPUs are of several models (by PCI bus: {_listing(machine)}), and CUDA may number them in"
            f" another order than their driver: set {CUDA_DEVICE_ORDER}=PCI_BUS_ID or list UUIDs in"
            f" {CUDA_VISIBLE_DEVICES}"
        )


def _listing(gpus: Sequence[NvmlGpu]) -> str:
    return ", ".join(f"{gpu.index} → {gpu.name}" for gpu in gpus)
