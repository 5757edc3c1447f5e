"""Power limits of NVIDIA GPUs through NVML, and the GPUs of this machine with a way to set them.

Reading a limit needs no rights. Setting one needs root, or CAP_SYS_ADMIN in a container
(``nvmlDeviceSetPowerManagementLimit``, NVML's API reference), and lasts until the driver unloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.nvml import MILLI, Nvml, NvmlGpu, installed_nvml, open_gpus
from zeus_plugins.power_limit.command import CommandDevice
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError
from zeus_plugins.training.environment import POWER_LIMIT_COMMAND

Answer = TypeVar("Answer")


class PowerNvml(Nvml, Protocol):
    """The part of `pynvml` that is used here; NVML documents the functions under these names. Limits are in mW."""

    def nvmlDeviceGetIndex(self, handle: Any) -> int: ...  # noqa: D102, N802  NVML's own name, here and below
    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes: ...  # noqa: D102, N802
    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int: ...  # noqa: D102, N802
    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mw: int) -> None: ...  # noqa: D102, N802


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


def find_devices(
    device_indices: Sequence[int] | None = None, *, command: str | None = None, nvml: Nvml | None = None
) -> tuple[PowerLimitDevice, ...]:
    """The NVIDIA GPUs that train, each with a way to set its limit: by a command where one is configured, else by NVML.

    Args:
        device_indices: Which of the visible GPUs, counting from 0. None: all of them. Empty: the training uses none.
        command: Sets a limit, as in `CommandDevice`. None: that of the environment variable
            ``ZEUS_POWER_LIMIT_COMMAND``, if it is set.
        nvml: What to call instead of the installed `pynvml`.

    Raises:
        PowerLimitUnavailableError: There is none, or one that the job has not to itself.
        ZeusBSOConfigError: The GPUs are of several models, one that was named does not exist, or the command is wrong.
    """
    command = command or POWER_LIMIT_COMMAND.text()
    if device_indices is not None and not device_indices:
        raise PowerLimitUnavailableError("the training runs on no NVIDIA GPU")
    try:
        devices = tuple(_device(gpu, nvml) for gpu in open_gpus(nvml, device_indices))
    except EnergyUnavailableError as error:
        raise PowerLimitUnavailableError(error.cause) from error
    return tuple(CommandDevice(command, each) for each in devices) if command else devices


def _device(gpu: NvmlGpu, nvml: Nvml | None) -> NvmlDevice:
    known = cast("PowerNvml", gpu.nvml)
    try:
        uuid, index = known.nvmlDeviceGetUUID(gpu.handle), known.nvmlDeviceGetIndex(gpu.handle)
    except known.NVMLError as error:
        raise PowerLimitUnavailableError(f"{gpu} does not tell which one it is: {error}") from error
    return NvmlDevice(uuid.decode() if isinstance(uuid, bytes) else uuid, index, str(gpu), nvml)
