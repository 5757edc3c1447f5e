"""A simulated NVIDIA driver, and a clock that tests advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

H200 = "NVIDIA H200"
V100 = "Tesla V100-SXM2-16GB"


class Clock:
    """Monotonic seconds that advance only on request."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class FakeNvmlError(Exception):
    """Equivalent of NVMLError, raised by `FakeNvml`."""


class FakeLibraryNotFoundError(FakeNvmlError):
    """Equivalent of NVMLError_LibraryNotFound."""


@dataclass
class FakeGpu:
    """A GPU of a simulated machine. None means an unsupported query."""

    name: str = H200
    uuid: str = "GPU-0"
    counter_mj: int | None = 7_000_000
    max_power_mw: int | None = 700_000
    power_mw: int | None = None
    # Default limit after a start of the driver, and the limit actually enforced.
    default_mw: int | None = None
    enforced_mw: int | None = None
    # Power limit in force, or None if the driver does not report it; and permission of this process to change it.
    limit_mw: int | None = 700_000
    may_set_limit: bool = True
    # Lower limits are silently raised to this; and a switch that ignores changes.
    clamps_to_mw: int | None = None
    ignores_limits: bool = False
    # Error when this process opens the GPU (a control group, a GPU that fell off the bus), or None.
    refusal: str | None = None
    # Number of failing future readings of its counter.
    passing_failures: int = 0
    # Processes that compute on the GPU, directly and by MPS.
    pids: list[int] = field(default_factory=list)
    mps_pids: list[int] = field(default_factory=list)
    # Present power, where `power_mw` is the mean of a second.
    instant_mw: int | None = None
    mig_mode: int | None = None
    # Compute slices of each MIG slice by position; CUDA names the first MIG-{uuid}, and each MIG-{uuid}/{position}/0.
    slices: list[int | None] = field(default_factory=list)
    # Module with a common counter, reported in place of the GPU's own.
    module: str | None = None

    def spend(self, energy_mj: int) -> None:
        """Let the counter rise."""
        self.counter_mj = supported(self.counter_mj) + energy_mj


@dataclass
class FakeSlice:
    """A MIG slice of a simulated GPU."""

    gpu: FakeGpu
    gpuInstanceSliceCount: int  # noqa: N815  NVML's own name, here and below
    computeInstanceSliceCount: int  # noqa: N815

    @property
    def name(self) -> str:
        return f"{self.gpu.name!s} MIG {self.gpuInstanceSliceCount}g.18gb"

    @property
    def uuid(self) -> str:
        return f"MIG-{self.gpu.uuid}"


@dataclass
class FakeNvml:
    """A simulated driver. Handles are the GPUs themselves."""

    machine: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    broken: str = ""
    NVMLError: type[Exception] = FakeNvmlError
    NVMLError_LibraryNotFound: type[Exception] = FakeLibraryNotFoundError
    calls: list[str] = field(default_factory=list)

    def spend(self, *energies_mj: int) -> None:
        """Let each GPU's counter rise."""
        for gpu, energy_mj in zip(self.machine, energies_mj, strict=True):
            gpu.spend(energy_mj)

    def nvmlInit(self) -> None:  # noqa: N802  NVML's own name, here and below
        self.calls.append("nvmlInit")
        if self.broken:
            raise (FakeLibraryNotFoundError if "Library Not Found" in self.broken else FakeNvmlError)(self.broken)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.machine)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return opened(self.machine[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeSlice:  # noqa: N802
        for gpu in self.machine:
            if gpu.uuid == uuid:
                return opened(gpu)
            if f"MIG-{gpu.uuid}" == uuid:
                slices = next((each for each in gpu.slices if each is not None), 0)
                return FakeSlice(gpu, slices, slices)
            if uuid.startswith(f"MIG-{gpu.uuid}/"):
                return self.nvmlDeviceGetMigDeviceHandleByIndex(gpu, int(uuid.split("/")[1]))
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeSlice) -> str | bytes:  # noqa: N802
        return handle.name

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> Sequence[int]:  # noqa: N802
        pending = 0
        return [supported(handle.mig_mode), pending]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(len(handle.slices) or None)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeSlice:  # noqa: N802
        slices = supported(handle.slices[index])
        return FakeSlice(handle, slices, slices)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: FakeSlice) -> FakeGpu:  # noqa: N802
        return handle.gpu

    def nvmlDeviceGetAttributes(self, handle: FakeSlice) -> FakeSlice:  # noqa: N802
        return handle

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802
        if handle.passing_failures:
            handle.passing_failures -= 1
            raise FakeNvmlError("Unknown Error")
        if handle.module is not None:
            return sum(supported(gpu.counter_mj) for gpu in self.machine if gpu.module == handle.module)
        place = next(place for place, gpu in enumerate(self.machine) if gpu is handle)
        return supported(handle.counter_mj) + place  # counters of two GPUs differ

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: FakeGpu) -> Sequence[int]:  # noqa: N802
        lowest_mw = 200_000
        return [lowest_mw, supported(handle.max_power_mw)]

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.default_mw)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return min(supported(handle.enforced_mw), supported(handle.limit_mw))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in handle.pids]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in handle.mps_pids]

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, handle: FakeGpu, fields: Sequence[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        assert fields == [(186, 0)]  # the present power of the GPU
        not_supported = 3
        value = SimpleNamespace(uiVal=handle.instant_mw or 0)
        return [SimpleNamespace(nvmlReturn=not_supported if handle.instant_mw is None else 0, value=value)]

    def nvmlDeviceGetIndex(self, handle: FakeGpu) -> int:  # noqa: N802
        return self.machine.index(handle)

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeSlice) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetPowerManagementLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.limit_mw)

    def nvmlDeviceSetPowerManagementLimit(self, handle: FakeGpu, limit_mw: int) -> None:  # noqa: N802
        if not handle.may_set_limit:
            raise FakeNvmlError("Insufficient Permissions")
        lowest_mw, highest_mw = self.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        if not lowest_mw <= limit_mw <= highest_mw:
            raise FakeNvmlError("Invalid Argument")
        if not handle.ignores_limits:
            handle.limit_mw = max(limit_mw, handle.clamps_to_mw or 0)


def opened(gpu: FakeGpu) -> FakeGpu:
    if gpu.refusal is not None:
        raise FakeNvmlError(gpu.refusal)
    return gpu


class FakeTorch:
    """A PyTorch in which CUDA numbers these GPUs by their UUIDs; without UUIDs, CUDA has not started."""

    def __init__(self, *uuids: str) -> None:
        self.cuda = self
        self._uuids = uuids

    def is_initialized(self) -> bool:
        return bool(self._uuids)

    def device_count(self) -> int:
        return len(self._uuids)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self._uuids[index])


def supported(answer: int | None) -> int:
    if answer is None:
        raise FakeNvmlError("Not Supported")
    return answer


def has_nvidia_driver() -> bool:
    """Return True if this machine has a real driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False
