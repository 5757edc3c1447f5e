"""NVIDIA GPUs through NVML: those that train, and descriptions of those that cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from zeus_plugins.energy.monitor import EnergyUnavailableError, NoGpuError, NoPowerLimitError
from zeus_plugins.energy.visible import (
    MIG_PREFIX,
    check_one_model,
    chosen_indices,
    cuda_devices,
    shared_counter,
    visible_devices,
)
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.training.environment import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES

MILLI = 1000

DIE = 0
"""``NVML_TEMPERATURE_GPU``, the sensor of the GPU's die."""

GPU_PREFIX = "GPU-"

Answer = TypeVar("Answer")


class Nvml(Protocol):
    """The part of `pynvml` (package nvidia-ml-py) that is used here; NVML documents the functions under these names."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: D102, N802  NVML's own name, here and below
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes: ...  # noqa: D102, N802
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...  # noqa: D102, N802
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...  # noqa: D102, N802
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetAttributes(self, handle: Any) -> Any: ...  # noqa: D102, N802
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any) -> Sequence[int]: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...  # noqa: D102, N802
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...  # noqa: D102, N802
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: Sequence[Any]) -> Sequence[Any]: ...  # noqa: D102, N802


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU; `index` counts those that this process may open from 0, by PCI bus."""

    nvml: Nvml
    handle: Any
    index: int
    name: str
    uuid: str = ""
    stated_power_w: float | None = None
    mig_handle: Any = None  # of the slice that was named, if one was

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest power limit that can be set, in watts; without one the default limit, else the one in force.

        The default comes first of these two, for it is the same tomorrow: a job is registered with its maximum power.
        """
        nvml = self.nvml
        questions: tuple[Callable[[Any], int], ...] = (
            lambda handle: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[1],
            nvml.nvmlDeviceGetPowerManagementDefaultLimit,
            nvml.nvmlDeviceGetEnforcedPowerLimit,
        )
        problem: Exception | None = None
        for question in questions:
            try:
                limit_mw = question(self.handle)
            except (nvml.NVMLError, AttributeError) as error:  # an older pynvml lacks a function
                problem = problem or error
            else:
                if limit_mw > 0:
                    return limit_mw / MILLI
        if self.stated_power_w is not None:
            return self.stated_power_w
        raise NoPowerLimitError(f"{self} gives no power limits: {problem or '0 W'}")

    def energy_uj(self) -> int:
        """Energy in microjoules since the driver was loaded."""
        return MILLI * self._ask("energy counter", self.nvml.nvmlDeviceGetTotalEnergyConsumption)

    def power_w(self) -> float:
        """The power that the GPU and its memory draw, in watts."""
        return self._ask("power reading", self.nvml.nvmlDeviceGetPowerUsage) / MILLI

    def temperature_c(self) -> float:
        """The temperature of the GPU's die, in °C."""
        return self._ask("temperature", lambda handle: self.nvml.nvmlDeviceGetTemperature(handle, DIE))

    def _ask(self, what: str, question: Callable[[Any], Answer]) -> Answer:
        try:
            return question(self.handle)
        except self.nvml.NVMLError as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error


def with_stated_power(gpus: Sequence[NvmlGpu], max_power_w: float | None) -> tuple[NvmlGpu, ...]:
    """The same GPUs, which draw so much together where they tell no limit; watts."""
    share_w = None if max_power_w is None else max_power_w / len(gpus)
    return tuple(replace(gpu, stated_power_w=share_w) for gpu in gpus)


def describe_gpus(gpus: Sequence[NvmlGpu]) -> GpuConfig:
    """Sum up GPUs of one model."""
    max_power_w = sum(gpu.max_power_w for gpu in gpus)
    return GpuConfig(max_power=max_power_w, number_of_gpus=len(gpus), gpu_model=gpus[0].name)


def open_gpus(
    nvml: Nvml | None = None, indices: Sequence[int | str] | None = None, *, torch: Any = None
) -> tuple[NvmlGpu, ...]:
    """Start NVML, find the chosen GPUs, and make sure that they are alike and that the job has each to itself.

    Args:
        nvml: What to call instead of the installed `pynvml`.
        indices: As `device_indices` of `NvmlMonitor`.
        torch: PyTorch. None: the one that this process has loaded, if any; none beside a stand-in for `pynvml`.

    Raises:
        NoGpuError: No driver answers, or no GPU is visible.
        EnergyUnavailableError: One of them cannot be opened, or is a slice of a GPU.
        ZeusBSOConfigError: They are of several models, or one that was named does not exist.
    """
    gpus = _chosen_gpus(nvml, indices, torch)
    for gpu in gpus:
        _check_whole(gpu)
    return gpus


def _chosen_gpus(nvml: Nvml | None, indices: Sequence[int | str] | None, torch: Any = None) -> tuple[NvmlGpu, ...]:
    """Those that train, alike, and perhaps shared; arguments and errors as of `open_gpus`."""
    if torch is None and nvml is None:
        torch = sys.modules.get("torch")
    nvml = nvml or installed_nvml()
    machine = _open_machine(nvml)
    named = [each for each in indices or () if isinstance(each, str)]
    if named:
        visible: Sequence[int | str] = named
    else:
        visible = cuda_devices(torch) or visible_devices(CUDA_VISIBLE_DEVICES.text(), len(machine.gpus))
        numbers = [each for each in indices if isinstance(each, int)] if indices is not None else None
        visible = [visible[index] for index in chosen_indices(numbers, len(visible))]
    gpus = tuple(machine.gpus[each] if isinstance(each, int) else _open_uuid(machine, each) for each in visible)
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise ZeusBSOConfigError(f"the same GPU is named twice ({_listing(gpus)}): name each once")
    check_one_model([gpu.name for gpu in gpus], _listing(gpus), CUDA_VISIBLE_DEVICES)
    if any(isinstance(device, int) for device in visible):
        _check_numbering(machine.gpus)
    return gpus


@dataclass(frozen=True)
class Portrait:
    """The properties of GPUs that cannot be measured; watts are None where they tell none.

    Its basis says where the watts come from.
    """

    names: tuple[str, ...]
    max_power_w: float | None
    basis: str = "by power limit"


def portrait_of(nvml: Nvml | None = None, indices: Sequence[int | str] | None = None) -> Portrait | None:
    """Describe GPUs that cannot be measured: slices of them, virtual ones, and those without any sensor.

    A MIG slice is taken to draw its share of the GPU's power limit.

    Returns:
        None where the driver tells nothing.

    Raises:
        ZeusBSOConfigError: As `open_gpus`.
    """
    try:
        gpus = _chosen_gpus(nvml, indices)
    except EnergyUnavailableError:
        return None
    parts = [_slice_of(gpu) for gpu in gpus]
    try:
        limits_w = [gpu.max_power_w for gpu in gpus]
    except NoPowerLimitError:
        return Portrait(tuple(part.name for part in parts), None)
    shares = [part.slices / part.whole for part in parts]
    of_slices = next((f"by power limit × {part.slices}/{part.whole} (MIG)" for part in parts if part.is_slice), None)
    power_w = sum(limit_w * share for limit_w, share in zip(limits_w, shares, strict=True))
    return Portrait(tuple(part.name for part in parts), power_w, of_slices or "by power limit")


class _Part(NamedTuple):
    """A GPU as a training has it, whole or a slice of it: so many of the slices that it can be cut into."""

    name: str
    slices: int = 1
    whole: int = 1
    is_slice: bool = False


def _slice_of(gpu: NvmlGpu) -> _Part:
    try:
        if not gpu.nvml.nvmlDeviceGetMigMode(gpu.handle)[0]:
            return _Part(gpu.name)
        whole = gpu.nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)
        handle = gpu.mig_handle if gpu.mig_handle is not None else _first_slice(gpu, whole)
        if handle is None or whole < 1:
            return _Part(f"{gpu.name} MIG")
        slices = gpu.nvml.nvmlDeviceGetAttributes(handle).gpuInstanceSliceCount
        name = _text(gpu.nvml.nvmlDeviceGetName(handle))
    except gpu.nvml.NVMLError:
        return _Part(gpu.name)
    return _Part(name if "MIG" in name else f"{gpu.name} MIG {slices}g", slices, whole, is_slice=True)


def _first_slice(gpu: NvmlGpu, whole: int) -> Any:
    """The slice that CUDA takes; None where there is none."""
    for place in range(whole):
        try:
            return gpu.nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
        except gpu.nvml.NVMLError:  # no slice is at this place
            continue
    return None


def installed_nvml() -> Nvml:
    """The package `pynvml`."""
    try:
        import pynvml
    except ImportError as error:
        raise NoGpuError(f"the package nvidia-ml-py cannot be imported: {error}") from error
    module: Nvml = pynvml
    return module


class _Machine(NamedTuple):
    """The GPUs of this machine in the order of NVML; and of those that cannot be opened, the reasons."""

    nvml: Nvml
    gpus: Sequence[NvmlGpu]
    refused: Sequence[str]


def _open_machine(nvml: Nvml) -> _Machine:
    """Open every GPU that this process may open: NVML counts the others, too (a Slurm control group, a lost GPU)."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver does not answer: {error}") from error
    gpus: list[NvmlGpu] = []
    refused: list[str] = []
    for place in range(count):
        try:
            gpus.append(_described(nvml, nvml.nvmlDeviceGetHandleByIndex(place), len(gpus)))
        except nvml.NVMLError as error:
            refused.append(f"GPU {place}: {error}")
    if refused and not gpus:
        raise EnergyUnavailableError(f"no GPU of this machine can be opened ({'; '.join(refused)})")
    return _Machine(nvml, gpus, refused)


def _described(nvml: Nvml, handle: Any, index: int) -> NvmlGpu:
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return NvmlGpu(nvml, handle, index, _text(name), _text(uuid))


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def _open_uuid(machine: _Machine, uuid: str) -> NvmlGpu:
    """The GPU of a UUID or its beginning, as CUDA takes it; or of a UUID without a prefix, as PyTorch gives it."""
    nvml = machine.nvml
    is_bare = not uuid.startswith((GPU_PREFIX, MIG_PREFIX))
    wanted = f"{GPU_PREFIX}{uuid}" if is_bare else uuid
    found = [gpu for gpu in machine.gpus if gpu.uuid.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if is_bare or uuid.startswith(MIG_PREFIX):
        slice_id = f"{MIG_PREFIX}{uuid}" if is_bare else uuid
        try:
            part = nvml.nvmlDeviceGetHandleByUUID(slice_id)
            whole = _described(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), 0)
        except nvml.NVMLError as error:
            if not is_bare:  # drivers know ids of their own generation only, in two notations
                cause = f"{uuid} in {CUDA_VISIBLE_DEVICES}, of which the driver says {error}"
                raise shared_counter(cause) from error
        else:
            known = next((gpu for gpu in machine.gpus if gpu.uuid == whole.uuid), whole)
            return replace(known, mig_handle=part)
    cause = "several GPUs begin so" if found else "the driver does not list it"
    if machine.refused or is_bare:  # not a mistake of the user's
        others = f" ({'; '.join(machine.refused)})" if machine.refused else ""
        raise EnergyUnavailableError(f"GPU {uuid} cannot be opened: {cause} among those that may be opened{others}")
    raise ZeusBSOConfigError(
        f"GPU {uuid} cannot be opened: {cause}. In {CUDA_VISIBLE_DEVICES}, name GPUs by their index or by their full"
        " UUID as `nvidia-smi -L` prints it"
    )


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
        part = _first_slice(gpu, whole)
        if part is not None:
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
