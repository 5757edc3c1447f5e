"""A simulated AMD driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MI300X = "AMD Instinct MI300X"
MI250X = "AMD Instinct MI250X"


class FakeAmdSmiError(Exception):
    """Equivalent of AmdSmiException, raised by `FakeAmdSmi`."""


@dataclass
class FakeAmdGpu:
    """A GPU of a simulated machine. None means an unsupported query."""

    name: str = MI300X
    steps: int | str | None = 1_000_000
    resolution_uj: float = 15.25
    max_power_uw: int | None = 750_000_000  # some versions of amdsmi: watts
    hip_id: int | None = None
    uuid: str = ""
    partition: str | None = "SPX"
    key: str = "energy_accumulator"
    power_w: float | str = "N/A"


@dataclass
class FakeAmdSmi:
    """A simulated driver. Handles are the GPUs themselves."""

    machine: list[FakeAmdGpu] = field(default_factory=lambda: [FakeAmdGpu()])
    broken: str = ""
    AmdSmiException: type[Exception] = FakeAmdSmiError

    def amdsmi_init(self) -> None:
        if self.broken:
            raise FakeAmdSmiError(self.broken)

    def amdsmi_get_processor_handles(self) -> Sequence[FakeAmdGpu]:
        return self.machine

    def amdsmi_get_gpu_asic_info(self, handle: FakeAmdGpu) -> Mapping[str, Any]:
        return {"market_name": handle.name}

    def amdsmi_get_gpu_enumeration_info(self, handle: FakeAmdGpu) -> Mapping[str, Any]:
        if handle.hip_id is None:
            raise FakeAmdSmiError("Not Supported")
        return {"hip_id": handle.hip_id, "hip_uuid": handle.uuid}

    def amdsmi_get_gpu_compute_partition(self, handle: FakeAmdGpu) -> str:
        if handle.partition is None:
            raise FakeAmdSmiError("Not Supported")
        return handle.partition

    def amdsmi_get_energy_count(self, handle: FakeAmdGpu) -> Mapping[str, Any]:
        if handle.steps is None:
            raise FakeAmdSmiError("Not Supported")
        return {handle.key: handle.steps, "counter_resolution": handle.resolution_uj, "timestamp": 1}

    def amdsmi_get_power_info(self, handle: FakeAmdGpu) -> Mapping[str, Any]:
        return {"current_socket_power": handle.power_w, "average_socket_power": "N/A"}

    def amdsmi_get_power_cap_info(self, handle: FakeAmdGpu) -> Mapping[str, Any]:
        if handle.max_power_uw is None:
            raise FakeAmdSmiError("Not Supported")
        return {"power_cap": handle.max_power_uw // 2, "max_power_cap": handle.max_power_uw}
