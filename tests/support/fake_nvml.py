"""A pretended NVIDIA driver, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

H200 = "NVIDIA H200"
V100 = "Tesla V100-SXM2-16GB"


class Clock:
    """Monotonic seconds that stand still until they are moved."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class FakeNvmlError(Exception):
    """Raised by `FakeNvml` wherever pynvml raises an NVMLError."""


@dataclass
class FakeGpu:
    """One GPU of a pretended machine. A None says that the GPU does not support the question."""

    name: str | bytes = H200
    uuid: str = "GPU-0"
    counter_mj: int | None = 7_000_000
    max_power_mw: int | None = 700_000
    power_mw: int | None = None
    # The power limit in force; None: the driver does not tell. And whether this process may set it.
    limit_mw: int | None = 700_000
    may_set_limit: bool = True
    mig_mode: int | None = None
    # The slices of compute that each of its MIG slices has, by their place; CUDA knows the first as MIG-{uuid}.
    slices: list[int | None] = field(default_factory=list)


@dataclass
class FakeSlice:
    """A MIG slice of a pretended GPU."""

    gpu: FakeGpu
    computeInstanceSliceCount: int  # noqa: N815  NVML's own name


@dataclass
class FakeNvml:
    """A pretended driver. Handles are the GPUs themselves."""

    machine: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    broken: str = ""
    NVMLError: type[Exception] = FakeNvmlError
    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:  # noqa: N802  NVML's own name, here and below
        self.calls.append("nvmlInit")
        if self.broken:
            raise FakeNvmlError(self.broken)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.machine)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.machine[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeSlice:  # noqa: N802
        for gpu in self.machine:
            if gpu.uuid == uuid:
                return gpu
            if f"MIG-{gpu.uuid}" == uuid:
                return FakeSlice(gpu, 0)
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str | bytes:  # noqa: N802
        return handle.name

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> Sequence[int]:  # noqa: N802
        pending = 0
        return [supported(handle.mig_mode), pending]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(len(handle.slices) or None)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeSlice:  # noqa: N802
        return FakeSlice(handle, supported(handle.slices[index]))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: FakeSlice) -> FakeGpu:  # noqa: N802
        return handle.gpu

    def nvmlDeviceGetAttributes(self, handle: FakeSlice) -> FakeSlice:  # noqa: N802
        return handle

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.counter_mj)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: FakeGpu) -> Sequence[int]:  # noqa: N802
        lowest_mw = 200_000
        return [lowest_mw, supported(handle.max_power_mw)]

    def nvmlDeviceGetIndex(self, handle: FakeGpu) -> int:  # noqa: N802
        return self.machine.index(handle)

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetPowerManagementLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return supported(handle.limit_mw)

    def nvmlDeviceSetPowerManagementLimit(self, handle: FakeGpu, limit_mw: int) -> None:  # noqa: N802
        if not handle.may_set_limit:
            raise FakeNvmlError("Insufficient Permissions")
        lowest_mw, highest_mw = self.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        if not lowest_mw <= limit_mw <= highest_mw:
            raise FakeNvmlError("Invalid Argument")
        handle.limit_mw = limit_mw


def supported(answer: int | None) -> int:
    if answer is None:
        raise FakeNvmlError("Not Supported")
    return answer


def has_nvidia_driver() -> bool:
    """Whether this machine has a real one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False
