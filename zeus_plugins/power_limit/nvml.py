"""Power limits of NVIDIA GPUs through NVML.

Reading a limit needs no rights. Setting one needs root, or CAP_SYS_ADMIN in a container
(``nvmlDeviceSetPowerManagementLimit``, NVML's API reference), and lasts until the driver unloads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

from zeus_plugins.energy.nvml_gpus import DIE, MILLI, Nvml, installed_nvml
from zeus_plugins.power_limit.devices import PowerLimitUnavailableError

Answer = TypeVar("Answer")


class PowerNvml(Nvml, Protocol):
    """The part of `pynvml` that is used here; NVML documents the functions under these names. Limits are in mW."""

    def nvmlDeviceGetIndex(self, handle: Any) -> int: ...  # noqa: D102, N802  NVML's own name, here and below
    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mw: int) -> None: ...  # noqa: D102, N802
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...  # noqa: D102, N802


class NvmlDevice:
    """A `PowerLimitDevice` over NVML.

    Args:
        uuid: The GPU's, as the driver gives it.
        index: The GPU's number as ``nvidia-smi -i`` takes it.
        name: What to call it.
        nvml: What to call instead of the installed `pynvml`.
    """

    outlives_process = True

    def __init__(self, uuid: str, index: int, name: str, nvml: Nvml | None = None) -> None:
        self.uuid = uuid
        self.index = index
        self._name = name
        self._nvml = nvml

    def __str__(self) -> str:
        return self._name

    # A handle is worth nothing in another process.
    def __getstate__(self) -> dict[str, Any]:
        is_module = getattr(self._nvml, "__name__", None) == "pynvml"
        kept = {name: value for name, value in vars(self).items() if name != "_opened"}
        return {**kept, "_nvml": None if is_module else self._nvml}

    def range_w(self) -> tuple[float, float]:
        """NVML's constraints; see `PowerLimitDevice.range_w`."""
        lowest_mw, highest_mw = self._ask(
            "power limits", lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        )
        return lowest_mw / MILLI, highest_mw / MILLI

    def limit_w(self) -> float:
        """NVML's management limit; see `PowerLimitDevice.limit_w`."""
        return self._ask("power limit", lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementLimit(handle)) / MILLI

    def set_limit_w(self, limit_w: float) -> None:
        """Set NVML's management limit; see `PowerLimitDevice.set_limit_w`."""
        limit_mw = round(limit_w * MILLI)
        self._ask(
            f"power limit of {limit_w:g} W",
            lambda nvml, handle: nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw),
        )

    def enforced_limit_w(self) -> float:
        """The limit that the driver obeys, watts, all limiters considered; the one that was set where it is not told.

        Raises:
            PowerLimitUnavailableError: The device does not tell.
        """
        try:
            in_force_mw = self._ask("limit in force", lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        except PowerLimitUnavailableError:
            return self.limit_w()
        return in_force_mw / MILLI

    def default_limit_w(self) -> float:
        """The limit after a start of the driver, watts.

        Raises:
            PowerLimitUnavailableError: It does not tell.
        """
        default_mw = self._ask("default limit", lambda nvml, each: nvml.nvmlDeviceGetPowerManagementDefaultLimit(each))
        return default_mw / MILLI

    def pci_address(self) -> str:
        """The address on the PCI bus, as ``domain:bus:device.function`` in hexadecimal digits.

        Raises:
            PowerLimitUnavailableError: It does not tell.
        """
        address = self._ask("PCI address", lambda nvml, handle: nvml.nvmlDeviceGetPciInfo(handle)).busId
        return address.decode() if isinstance(address, bytes) else str(address)

    def temperature_c(self) -> float:
        """The temperature of the GPU's die, °C.

        Raises:
            PowerLimitUnavailableError: It does not tell.
        """
        return self._ask("temperature", lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, DIE))

    def _ask(self, what: str, question: Callable[[PowerNvml, Any], Answer]) -> Answer:
        nvml, handle = self._opened
        try:
            return question(nvml, handle)
        except nvml.NVMLError as error:
            raise PowerLimitUnavailableError(f"{self} takes or gives no {what}: {error}") from error

    @cached_property
    def _opened(self) -> tuple[PowerNvml, Any]:
        nvml = cast("PowerNvml", self._nvml or installed_nvml())
        try:
            nvml.nvmlInit()
            return nvml, nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except nvml.NVMLError as error:
            raise PowerLimitUnavailableError(f"{self} cannot be opened: {error}") from error
