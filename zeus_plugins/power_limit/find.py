"""The GPUs of this machine, each with a way to set its power limit."""

from __future__ import annotations

from collections.abc import Sequence

from zeus_plugins.energy.nvml import Nvml
from zeus_plugins.power_limit.command import CommandDevice
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError
from zeus_plugins.power_limit.nvml import open_devices
from zeus_plugins.training.environment import POWER_LIMIT_COMMAND

__all__ = ["find_devices"]


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
    devices = open_devices(device_indices, nvml=nvml)
    return tuple(CommandDevice(command, each) for each in devices) if command else devices
