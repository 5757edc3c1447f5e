"""NVIDIA GPUs through NVML: the GPUs of a training, their energy, and other processes that use them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from zeus_plugins.energy.counters import SAMPLE_INTERVAL_S, CounterMonitor, Found, IntegratedPower
from zeus_plugins.energy.monitor import (
    BrokenDriverError,
    Choice,
    EnergyUnavailableError,
    MonitorRequest,
    NoGpuError,
    NoPowerLimitError,
    UnmeasuredGpuError,
    warn_once,
)
from zeus_plugins.energy.processes import gpu_is_used, is_hidden, own_processes
from zeus_plugins.environment import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES
from zeus_plugins.errors import ZeusBSOConfigError

Nvml = Any
"""The package `pynvml` (nvidia-ml-py), which has no types, or a replacement in a test."""

MILLI = 1000

# NVML_FI_DEV_POWER_INSTANT, and NVML_POWER_SCOPE_GPU.
_POWER_INSTANT, _OF_GPU = 186, 0

_GPU_PREFIX, _MIG_PREFIX = "GPU-", "MIG-"


def probe(request: MonitorRequest, nvml: Nvml | None = None) -> Choice:
    """Choose a monitor of the NVIDIA GPUs of the training; see `Probe`."""
    indices = request.device_indices
    if request.uses_no_gpu:
        raise NoGpuError("the training uses no GPU")
    try:
        open_gpus(nvml, indices)
        return request.counted_or_integrated(
            partial(NvmlMonitor, indices, nvml=nvml), partial(NvmlPowerMonitor, indices, nvml=nvml)
        )
    except NoGpuError:
        raise
    except EnergyUnavailableError as unavailable:
        raise _unmeasured(unavailable.cause, nvml, indices) from unavailable


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU; `index` counts the GPUs that this process may open, from 0 in the order of the PCI bus."""

    nvml: Nvml
    handle: Any
    index: int
    name: str
    uuid: str = ""
    mig_handle: Any = None  # of a named MIG slice

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def max_power_w(self) -> float:
        """The highest settable power limit in watts, else the default limit, else the limit in force.

        The default limit comes before the limit in force because it does not change, and a job is registered with it.
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
        raise NoPowerLimitError(f"{self} gives no power limits: {problem or '0 W'}")

    def number(self) -> int:
        """Return the number for ``nvidia-smi -i``."""
        return self._ask("number", self.nvml.nvmlDeviceGetIndex)

    def energy_uj(self) -> int:
        """Return the microjoules since the driver was loaded."""
        return MILLI * self._ask("energy counter", self.nvml.nvmlDeviceGetTotalEnergyConsumption)

    def power_w(self) -> float:
        """Read the power of the GPU and its memory, in watts; a mean of one second on Ampere or later, except GA100."""
        return self._ask("power reading", self.nvml.nvmlDeviceGetPowerUsage) / MILLI

    def instant_power_w(self) -> float:
        """Read the present power of the GPU and its memory, in watts, else `power_w`."""
        try:
            (answer,) = self.nvml.nvmlDeviceGetFieldValues(self.handle, [(_POWER_INSTANT, _OF_GPU)])
        except (self.nvml.NVMLError, AttributeError):  # an older driver or pynvml
            return self.power_w()
        return answer.value.uiVal / MILLI if answer.nvmlReturn == 0 and answer.value.uiVal else self.power_w()

    def other_processes(self, own: Collection[int] = ()) -> int:
        """Return the number of listed processes that compute on this GPU and do not belong to the training.

        `own` are the ids of the training's processes; this process and all descendants are added. In a container, the
        driver may list the ids that processes have outside: if this process uses a GPU, one such id counts as its own.
        """
        lists = []
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            try:
                lists.append({process.pid for process in getattr(self.nvml, name)(self.handle)})
            except (self.nvml.NVMLError, AttributeError):
                lists.append(set())
        plain, by_mps = (each - {0, 2**32 - 1} for each in lists)  # without the ids of hidden processes
        if not plain | by_mps:
            return 0
        known = own_processes(own)
        others = (plain | by_mps) - known
        is_listed = bool(known & (plain | by_mps))
        unknown = not is_listed and gpu_is_used() and any(map(is_hidden, others))
        server = bool(by_mps and plain - by_mps - known)  # the MPS server computes for its clients
        return len(others) - unknown - server

    def _ask(self, what: str, question: Callable[[Any], int]) -> int:
        try:
            return question(self.handle)
        except self.nvml.NVMLError as error:
            raise EnergyUnavailableError(f"{self} gives no {what}: {error}") from error


class NvmlMonitor(CounterMonitor):
    """An `EnergyMonitor` over the energy counters of the visible NVIDIA GPUs.

    `gpus` and `begin_window` open the driver. If PyTorch has started CUDA before, its GPUs are found by UUID. Otherwise
    ``CUDA_VISIBLE_DEVICES`` is read, with indices in the order of the PCI bus, so a machine with GPUs of several models
    has to set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. Like CUDA, this monitor does not count GPUs that this process may not
    open.

    The counters change every few tens of milliseconds, which limits the precision of a window's start and end. A
    measurement's source states whether other processes share the GPUs.

    Args:
        device_indices: Indices among the visible GPUs, and UUIDs of GPUs of this machine. None: all visible GPUs.
        max_power_w: Summed maximum power of the GPUs in watts, used if the driver gives no limit, as on many laptops.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, a GPU that cannot be opened or has no counter
            of its own. From `gpus`: no power limit is known, and `max_power_w` is None.
        ZeusBSOConfigError: On first use: the GPUs are of several models, or a named GPU does not exist.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        max_power_w: float | None = None,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__("nvml", partial(_counted, nvml, device_indices), clock, max_power_w=max_power_w, sleep=sleep)


class NvmlPowerMonitor(CounterMonitor):
    """An `EnergyMonitor` that integrates power readings of the visible NVIDIA GPUs, every 0.05 s in a window.

    It reads the present power if the driver offers it, otherwise the plain reading. If the power steps by ΔP between
    two readings, the energy is off by at most ΔP × 0.025 s, plus the sensor's own error (docs/energy.md). If two
    readings were more than a second apart, the source says so. The arguments and errors are those of `NvmlMonitor`.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        max_power_w: float | None = None,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        find = partial(_integrated, nvml, device_indices, clock)
        super().__init__("nvml power, integrated", find, clock, SAMPLE_INTERVAL_S, max_power_w)


def _notes(gpus: Sequence[NvmlGpu], own: Collection[int]) -> Sequence[str]:
    """Return the note that other processes compute on these GPUs, if they do."""
    sharing = [str(gpu) for gpu in gpus if gpu.other_processes(own)]
    if sharing:
        warn_once(
            f"other processes compute beside this training (on {', '.join(sharing)}): its energy is theirs, too, and"
            " the cost of its batch size depends on them"
        )
    return ["shared with other processes"] if sharing else []


def _counted(nvml: Nvml | None, indices: Sequence[int | str] | None) -> Found:
    """Find GPUs with counters of their own; raise `EnergyUnavailableError` if two GPUs have the counter of a module."""
    found = _found(nvml, indices)
    before, after = ([gpu.energy_uj() for gpu in found.devices] for _ in range(2))
    for one, other in combinations(range(found.number), 2):
        if 0 < before[one] <= before[other] <= after[one]:  # equal, but for an update between the readings
            names = f"{found.devices[one]} and {found.devices[other]}"
            raise EnergyUnavailableError(f"{names} give the same counter, that of their module")
    return found


def _found(nvml: Nvml | None, indices: Sequence[int | str] | None) -> Found:
    gpus = open_gpus(nvml, indices)
    return Found(gpus, len(gpus), gpus[0].name, partial(_notes, gpus))


def _integrated(nvml: Nvml | None, indices: Sequence[int | str] | None, clock: Callable[[], float]) -> Found:
    found = _found(nvml, indices)
    return found._replace(devices=[IntegratedPower(gpu, clock) for gpu in found.devices])


def open_gpus(
    nvml: Nvml | None = None, indices: Sequence[int | str] | None = None, *, torch: Any = None
) -> tuple[NvmlGpu, ...]:
    """Start NVML and return the GPUs of `indices` (see `NvmlMonitor`).

    Raises:
        NoGpuError: No driver answers, or no GPU is visible.
        EnergyUnavailableError: A GPU cannot be opened, or is a slice of a GPU.
        ZeusBSOConfigError: The GPUs are of several models, or a named GPU does not exist.
    """
    gpus = _chosen_gpus(nvml, indices, torch)
    for gpu in gpus:
        if not _part_of(gpu).is_whole:
            raise _shared_counter(str(gpu))
    return gpus


def _chosen_gpus(nvml: Nvml | None, indices: Sequence[int | str] | None, torch: Any = None) -> tuple[NvmlGpu, ...]:
    """Find the GPUs like `open_gpus`, but allow slices."""
    other = next((each for each in indices or () if isinstance(each, str) and each.isalpha()), None)
    if other is not None:
        raise EnergyUnavailableError(f"this package does not read the energy of {other} devices")
    if torch is None and nvml is None:
        torch = sys.modules.get("torch")
    nvml = nvml or installed_nvml()
    machine, refused = _open_machine(nvml)
    numbers = None if indices is None else [each for each in indices if isinstance(each, int)]
    visible: Sequence[int | str] = indices or ()
    if numbers or not visible:
        shown = cuda_devices(torch) or visible_devices(CUDA_VISIBLE_DEVICES.text(), len(machine))
        chosen = chosen_indices(numbers, len(shown))
        visible = [shown[each] if isinstance(each, int) else each for each in visible or chosen]
    gpus = tuple(
        machine[each] if isinstance(each, int) else _open_uuid(nvml, each, machine, refused) for each in visible
    )
    named_parts = {(gpu.index, each if gpu.mig_handle else "") for gpu, each in zip(gpus, visible, strict=True)}
    if len(named_parts) < len(gpus):
        raise ZeusBSOConfigError(f"the same GPU is named twice ({_listing(gpus)}): name each once")
    check_one_model([gpu.name for gpu in gpus], _listing(gpus))
    is_mixed = len({gpu.name for gpu in machine}) > 1
    if is_mixed and any(isinstance(each, int) for each in visible) and CUDA_DEVICE_ORDER.text() != "PCI_BUS_ID":
        raise ZeusBSOConfigError(
            f"this machine's GPUs are of several models (by PCI bus: {_listing(machine)}), and CUDA may number them in"
            f" another order than their driver: set {CUDA_DEVICE_ORDER}=PCI_BUS_ID or list UUIDs in"
            f" {CUDA_VISIBLE_DEVICES}"
        )
    return gpus


def visible_devices(setting: str | None, count: int) -> tuple[int | str, ...]:
    """Parse ``CUDA_VISIBLE_DEVICES`` on a machine with `count` GPUs into indices, UUIDs and ids of MIG slices.

    As in CUDA, the list ends at the first entry that names no GPU, so ``""``, ``-1`` and a scheduler's ``NoDevFiles``
    hide every GPU. None means that all are visible. Raise `NoGpuError` if no GPU is visible, and `ZeusBSOConfigError`
    if a GPU is named twice.
    """
    visible: list[int | str] = list(range(count)) if setting is None else []
    entries = [] if setting is None else [part.strip() for part in setting.split(",")]
    for entry in entries:
        if entry.startswith((_GPU_PREFIX, _MIG_PREFIX)):
            visible.append(entry)
        elif entry.isdecimal() and int(entry) < count:
            visible.append(int(entry))
        else:
            break
    if not visible:
        hidden = f", hidden by {CUDA_VISIBLE_DEVICES}={setting!r}" if count else ""
        raise NoGpuError(f"no GPU is visible: the driver lists {count}{hidden}")
    if len(set(visible)) < len(visible):
        raise ZeusBSOConfigError(f"{CUDA_VISIBLE_DEVICES} is {setting!r}: name each GPU once")
    return tuple(visible)


def cuda_devices(torch: Any) -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs, without prefix, in the order of PyTorch's CUDA indices.

    The environment variables may have changed since CUDA read them at its start, and CUDA may count the fastest GPU
    first. Return None if CUDA has not started in this process (a query would start it), or if PyTorch is absent or
    older than 2.4.
    """
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
    except (AttributeError, RuntimeError, AssertionError):  # an older PyTorch, or one without CUDA
        return None


def chosen_indices(wanted: Sequence[int] | None, visible: int) -> Sequence[int]:
    """Validate `wanted` against `visible` GPUs; return distinct indices, at least one, or all of them for None."""
    if wanted is None:
        return range(visible)
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(visible)):
        raise ZeusBSOConfigError(
            f"device_indices is {list(wanted)}: name one or more of the {visible} visible GPUs, counting from 0, each"
            " once, or pass None for all"
        )
    return wanted


def check_one_model(names: Sequence[str], listing: str) -> None:
    """Raise `ZeusBSOConfigError`, with `listing`, if GPUs are of several models."""
    if len(set(names)) > 1:
        raise ZeusBSOConfigError(
            f"the GPUs are of several models ({listing}), and costs measured on them do not compare: choose the GPUs "
            f"of one model by device_indices or {CUDA_VISIBLE_DEVICES}"
        )


def _unmeasured(cause: str, nvml: Nvml | None, indices: Sequence[int | str] | None) -> UnmeasuredGpuError:
    """Describe GPUs that cannot be measured: slices, virtual GPUs, and GPUs without any sensor.

    The maximum power of a MIG slice is its share of the GPU's power limit.
    """
    try:
        gpus = _chosen_gpus(nvml, indices)
    except EnergyUnavailableError:
        return UnmeasuredGpuError(cause)
    parts = [_part_of(gpu) for gpu in gpus]
    try:
        power_w = sum(gpu.max_power_w * part.slices / part.of_slices for gpu, part in zip(gpus, parts, strict=True))
    except NoPowerLimitError:
        power_w = None
    share = next((f" × {part.slices}/{part.of_slices} (MIG)" for part in parts if part.of_slices > 1), "")
    basis = f"by power limit{share}"
    return UnmeasuredGpuError(cause, number=len(gpus), model=parts[0].name, max_power_w=power_w, basis=basis)


class _Part(NamedTuple):
    """The part of a GPU that a training uses, in MIG slices."""

    name: str
    slices: int = 1
    of_slices: int = 1
    is_whole: bool = False


def _part_of(gpu: NvmlGpu) -> _Part:
    """Return the named MIG slice, else the first slice, which CUDA uses; without slices, the whole GPU.

    There may be more slices than NVML lists: in a container, it hides slices that are not the container's.
    """
    nvml = gpu.nvml
    try:
        current_mode, _pending_mode = nvml.nvmlDeviceGetMigMode(gpu.handle)
    except nvml.NVMLError:  # GPUs older than Ampere do not know the mode
        current_mode = 0
    if not current_mode:
        return _Part(gpu.name, is_whole=True)
    try:
        whole = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)
        handle = gpu.mig_handle
        for place in range(whole) if handle is None else ():
            with contextlib.suppress(nvml.NVMLError):  # no slice is at this place
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
                break
        if handle is None or whole < 1:
            return _Part(f"{gpu.name} MIG")
        attributes, name = nvml.nvmlDeviceGetAttributes(handle), nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError:
        return _Part(gpu.name)
    slices = attributes.gpuInstanceSliceCount
    name = name if "MIG" in name else f"{gpu.name} MIG {slices}g"
    return _Part(name, slices, whole, is_whole=attributes.computeInstanceSliceCount >= whole)


def installed_nvml() -> Nvml:
    """Import `pynvml`; raise `NoGpuError` if that fails."""
    try:
        import pynvml
    except ImportError as error:
        raise NoGpuError(f"the package nvidia-ml-py cannot be imported: {error}") from error
    return pynvml


def _open_machine(nvml: Nvml) -> tuple[list[NvmlGpu], list[str]]:
    """Return the GPUs in the order of NVML, and the reasons why others cannot be opened.

    NVML's count includes lost GPUs and GPUs of other Slurm control groups.
    """
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        said = f"the NVIDIA driver does not answer: {error}"
        if isinstance(error, nvml.NVMLError_LibraryNotFound):
            remedy = "(in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility shows it)"
            raise NoGpuError(f"{said} {remedy}") from error
        raise BrokenDriverError(said) from error
    if not hasattr(nvml, "nvmlDeviceGetMigMode"):
        raise EnergyUnavailableError("another package replaces pynvml: reinstall nvidia-ml-py")
    gpus: list[NvmlGpu] = []
    refused: list[str] = []
    for place in range(count):
        try:
            gpus.append(_described(nvml, nvml.nvmlDeviceGetHandleByIndex(place), len(gpus)))
        except nvml.NVMLError as error:
            refused.append(f"GPU {place}: {error}")
    if refused and not gpus:
        raise EnergyUnavailableError(f"no GPU of this machine can be opened ({'; '.join(refused)})")
    return gpus, refused


def _described(nvml: Nvml, handle: Any, index: int) -> NvmlGpu:
    return NvmlGpu(nvml, handle, index, nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle))


def _open_uuid(nvml: Nvml, uuid: str, machine: Sequence[NvmlGpu], refused: Sequence[str]) -> NvmlGpu:
    """Find a GPU by its UUID, by the beginning of its UUID (as CUDA does), or by PyTorch's UUID without a prefix."""
    is_bare = not uuid.startswith((_GPU_PREFIX, _MIG_PREFIX))
    wanted = f"{_GPU_PREFIX}{uuid}" if is_bare else uuid
    found = [gpu for gpu in machine if gpu.uuid.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if is_bare or uuid.startswith(_MIG_PREFIX):
        slice_id = f"{_MIG_PREFIX}{uuid}" if is_bare else uuid
        try:
            part = nvml.nvmlDeviceGetHandleByUUID(slice_id)
            whole = _described(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), 0)
        except nvml.NVMLError as error:
            if not is_bare:  # there are two notations, of which a driver knows one
                cause = f"{uuid} in {CUDA_VISIBLE_DEVICES}, of which the driver says {error}"
                raise _shared_counter(cause) from error
        else:
            known = next((gpu for gpu in machine if gpu.uuid == whole.uuid), whole)
            return replace(known, mig_handle=part)
    cause = "several GPUs begin so" if found else "the driver does not list it"
    if refused or is_bare:  # not the user's mistake
        others = f" ({'; '.join(refused)})" if refused else ""
        raise EnergyUnavailableError(f"GPU {uuid} cannot be opened: {cause} among those that may be opened{others}")
    raise ZeusBSOConfigError(
        f"GPU {uuid} cannot be opened: {cause}. In {CUDA_VISIBLE_DEVICES}, name GPUs by their index or by their full"
        " UUID as `nvidia-smi -L` prints it"
    )


def _listing(gpus: Sequence[NvmlGpu]) -> str:
    return ", ".join(f"{gpu.index} → {gpu.name}" for gpu in gpus)


def _shared_counter(device: str) -> EnergyUnavailableError:
    return EnergyUnavailableError(
        f"{device}: a MIG slice shares the energy counter of its GPU, so its own energy is unknown unless it is the "
        "whole GPU"
    )
