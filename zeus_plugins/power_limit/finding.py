"""The GPUs that train, each with a way to set its power limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.nvml_gpus import Nvml, NvmlGpu, open_gpus
from zeus_plugins.power_limit.command import CommandDevice
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError
from zeus_plugins.power_limit.nvml import NvmlDevice, PowerNvml
from zeus_plugins.power_limit.zeusd import ZeusdDevice
from zeus_plugins.training.environment import POWER_LIMIT_COMMAND, ZEUSD_SOCK_PATH


def find_devices(
    device_indices: Sequence[int | str] | None = None, *, command: str | None = None, nvml: Nvml | None = None
) -> tuple[PowerLimitDevice, ...]:
    """The NVIDIA GPUs that train, each with a way to set its limit: a command or zeusd, if configured, else NVML.

    Args:
        device_indices: Which of the visible GPUs, counting from 0, or their UUIDs. None: all of them. Empty: the
            training uses none.
        command: Sets a limit, as in `CommandDevice`. None: that of the environment variable
            ``ZEUS_POWER_LIMIT_COMMAND``, if it is set; else zeusd sets it, if ``ZEUSD_SOCK_PATH`` is set.
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
    if command:
        return tuple(CommandDevice(command, each) for each in devices)
    socket_path = ZEUSD_SOCK_PATH.text()
    return tuple(ZeusdDevice(socket_path, each) for each in devices) if socket_path else devices


def _device(gpu: NvmlGpu, nvml: Nvml | None) -> NvmlDevice:
    known = cast("PowerNvml", gpu.nvml)
    try:
        index = known.nvmlDeviceGetIndex(gpu.handle)
    except known.NVMLError as error:
        raise PowerLimitUnavailableError(f"{gpu} does not tell which one it is: {error}") from error
    return NvmlDevice(gpu.uuid, index, str(gpu), nvml)
