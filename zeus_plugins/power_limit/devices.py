"""GPUs with a settable power limit, and the ways to set it: NVML, or a command.

Any user may read a limit through NVML. Only root may set it, or in a container a process with CAP_SYS_ADMIN. A limit
lasts until the driver unloads (``nvmlDeviceSetPowerManagementLimit``, NVML's API reference).
"""

from __future__ import annotations

import shlex
import string
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.nvml import MILLI, Nvml, installed_nvml, open_gpus
from zeus_plugins.environment import POWER_LIMIT_COMMAND, ZEUSD_SOCK_PATH
from zeus_plugins.errors import ZeusBSOConfigError

TOLERANCE_W = 1.0
"""Two limits that differ by at most this value are treated as equal, because some drivers round."""

# A driver may take some time to apply a limit.
_WAITS_S = (0.0, 0.02, 0.1)

_COMMAND_TIMEOUT_S = 30.0
_FIELDS = {"index", "uuid", "watts", "milliwatts"}


class PowerLimitUnavailableError(ZeusBSOConfigError):
    """No power limit can be read or set: no GPU, no permission, or a device that does not answer."""


class PowerLimitDevice(Protocol):
    """One GPU's power limit; `str()` names the GPU.

    An implementation can be pickled at any time, because another process restores the limit if this process is killed.
    All methods raise `PowerLimitUnavailableError` on failure.
    """

    @property
    def uuid(self) -> str | None:
        """The GPU's UUID; None if its limit ends with this process, and need not be restored."""

    def range_w(self) -> tuple[float, float]:
        """Return the lowest and the highest settable limit, in watts."""

    def limit_w(self) -> float:
        """Return the limit in force, in watts."""

    def set_limit_w(self, limit_w: float) -> None:
        """Set the limit, in watts."""

    def enforced_limit_w(self) -> float:
        """Return the limit that the GPU obeys, in watts: another limiter may keep it below the set limit."""

    def default_limit_w(self) -> float | None:
        """Return the limit after a start of the driver, in watts; None if it is unknown."""


def set_and_check(device: PowerLimitDevice, limit_w: float) -> None:
    """Set a limit, in watts, and raise `PowerLimitUnavailableError` if it was clamped or ignored."""
    device.set_limit_w(limit_w)
    for wait_s in _WAITS_S:
        time.sleep(wait_s)
        in_force_w = device.limit_w()
        if abs(in_force_w - limit_w) <= TOLERANCE_W:
            return
    raise PowerLimitUnavailableError(
        f"{device} was given a power limit of {limit_w:g} W, and has one of {in_force_w:g} W in force"
    )


def find_devices(
    device_indices: Sequence[int | str] | None = None, *, nvml: Nvml | None = None
) -> tuple[PowerLimitDevice, ...]:
    """Find the training's NVIDIA GPUs; ``ZEUS_POWER_LIMIT_COMMAND``, if set, is the command for their limits.

    Args:
        device_indices: Indices among the visible GPUs, or UUIDs. None: all visible GPUs. Empty: no GPU.
        nvml: A replacement for the installed `pynvml`.

    Raises:
        PowerLimitUnavailableError: No GPU is available, or a GPU is a MIG slice.
        ZeusBSOConfigError: The GPUs are of several models, a named GPU does not exist, or the command is wrong.
    """
    command = POWER_LIMIT_COMMAND.text()
    if device_indices is not None and not device_indices:
        raise PowerLimitUnavailableError("the training runs on no NVIDIA GPU")
    if not command and ZEUSD_SOCK_PATH.text():
        raise PowerLimitUnavailableError(
            f"{ZEUSD_SOCK_PATH} is no longer read: set {POWER_LIMIT_COMMAND} to the command for zeusd in"
            " docs/power-limit.md"
        )
    arguments = _parsed(command) if command else ()
    try:
        gpus = open_gpus(nvml, device_indices)
        return tuple(NvmlDevice(gpu.uuid, gpu.number(), str(gpu), nvml, arguments) for gpu in gpus)
    except EnergyUnavailableError as error:
        raise PowerLimitUnavailableError(error.cause) from error


@dataclass(eq=False)
class NvmlDevice:
    """A `PowerLimitDevice` over NVML, which may set limits by a command on machines where a training may not set them.

    The command runs without a shell. It must end with status 0 within 30 s; otherwise the limit counts as not set.

    Attributes:
        uuid: The GPU's UUID.
        index: The GPU's number for ``nvidia-smi -i``. In a container, only the container's GPUs are counted.
        name: The GPU's name in messages.
        nvml: A replacement for the installed `pynvml`.
        command: The command's arguments, such as ``sudo -n nvidia-smi -i {uuid} -pl {watts}``, which name the GPU by
            ``{uuid}`` or ``{index}``, and the limit by ``{watts}`` or ``{milliwatts}``. Empty: NVML sets the limit.
    """

    uuid: str
    index: int
    name: str
    nvml: Nvml | None = None
    command: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name

    # A handle is invalid in another process.
    def __getstate__(self) -> dict[str, Any]:
        is_module = getattr(self.nvml, "__name__", None) == "pynvml"
        kept = {name: value for name, value in vars(self).items() if name != "_opened"}
        return {**kept, "nvml": None if is_module else self.nvml}

    def range_w(self) -> tuple[float, float]:
        """See `PowerLimitDevice.range_w`."""
        lowest_mw, highest_mw = self._ask("power limits", "nvmlDeviceGetPowerManagementLimitConstraints")
        return lowest_mw / MILLI, highest_mw / MILLI

    def limit_w(self) -> float:
        """See `PowerLimitDevice.limit_w`."""
        return float(self._ask("power limit", "nvmlDeviceGetPowerManagementLimit") / MILLI)

    def set_limit_w(self, limit_w: float) -> None:
        """See `PowerLimitDevice.set_limit_w`."""
        limit_mw = round(limit_w * MILLI)
        if not self.command:
            self._ask(f"power limit of {limit_w:g} W", "nvmlDeviceSetPowerManagementLimit", limit_mw)
            return
        fields = {"index": self.index, "uuid": self.uuid, "watts": f"{limit_w:.10g}", "milliwatts": limit_mw}
        command = [part.format(**fields) for part in self.command]
        try:
            done = subprocess.run(  # nosec B603  # noqa: S603 - the user's own command, split into arguments and run without a shell
                command,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PowerLimitUnavailableError(f"{shlex.join(command)} could not be run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise PowerLimitUnavailableError(f"{shlex.join(command)} ended with status {done.returncode}: {said}")

    def enforced_limit_w(self) -> float:
        """Return the limit that the driver enforces, in watts; if the driver gives none, the set limit."""
        try:
            return float(self._ask("limit in force", "nvmlDeviceGetEnforcedPowerLimit") / MILLI)
        except PowerLimitUnavailableError:
            return self.limit_w()

    def default_limit_w(self) -> float | None:
        """See `PowerLimitDevice.default_limit_w`."""
        try:
            return float(self._ask("default limit", "nvmlDeviceGetPowerManagementDefaultLimit") / MILLI)
        except PowerLimitUnavailableError:
            return None

    def _ask(self, what: str, function: str, *arguments: int) -> Any:
        """Call a function of NVML for this GPU; raise `PowerLimitUnavailableError` if it fails."""
        nvml, handle = self._opened
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError as error:
            raise PowerLimitUnavailableError(f"{self} takes or gives no {what}: {error}") from error

    @cached_property
    def _opened(self) -> tuple[Nvml, Any]:
        nvml = self.nvml or installed_nvml()
        try:
            nvml.nvmlInit()
            return nvml, nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except nvml.NVMLError as error:
            raise PowerLimitUnavailableError(f"{self} cannot be opened: {error}") from error


def _parsed(template: str) -> tuple[str, ...]:
    """Split a command into its arguments; raise `ZeusBSOConfigError` unless it names the GPU and the limit."""
    try:
        arguments = shlex.split(template)
        fields = {name for part in arguments for _, name, *_ in string.Formatter().parse(part) if name}
    except ValueError as error:
        raise ZeusBSOConfigError(f"the command for power limits {template!r} cannot be read: {error}") from error
    if not fields & {"watts", "milliwatts"} or not fields & {"index", "uuid"} or fields - _FIELDS:
        raise ZeusBSOConfigError(
            f"the command for power limits {template!r} has the fields {sorted(fields)}: it needs {{uuid}} or "
            "{index}, and {watts} or {milliwatts}, and no others"
        )
    return tuple(arguments)
