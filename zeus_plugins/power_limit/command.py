"""Power limits set by a command, for trainings that may not set them themselves."""

from __future__ import annotations

import shlex
import string
import subprocess
from collections.abc import Callable

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitDevice, PowerLimitUnavailableError, enforced_limit_w
from zeus_plugins.training.environment import POWER_LIMIT_COMMAND

COMMAND_VARIABLE = POWER_LIMIT_COMMAND.name

_TIMEOUT_S = 30.0


class CommandDevice:
    """A `PowerLimitDevice` that reads as another one does and sets by a command.

    The command is run without a shell, and has set the limit if it ends with status 0 within 30 s. So many machines
    let trainings change power limits and nothing else: a rule for ``sudo``, or a small program of the site's own.

    Args:
        template: The command, e.g. ``sudo -n nvidia-smi -i {uuid} -pl {watts}``. ``{uuid}`` is the GPU's UUID and
            ``{index}`` its number, both as ``nvidia-smi -i`` takes them, ``{watts}`` the limit in watts. In a
            container, numbers count its own GPUs: a command that works outside of it needs the UUID.
        device: Reads the range and the limit in force.
        index: Stands for ``{index}``. None: that of `device`.

    Raises:
        ZeusBSOConfigError: The template has other fields or lacks one of these.
    """

    outlives_process = True

    def __init__(self, template: str, device: PowerLimitDevice, index: int | None = None) -> None:
        try:
            self._arguments = shlex.split(template)
            fields = {name for part in self._arguments for _, name, *_ in string.Formatter().parse(part) if name}
        except ValueError as error:
            raise ZeusBSOConfigError(f"the command for power limits {template!r} cannot be read: {error}") from error
        if "watts" not in fields or not fields & {"index", "uuid"} or fields - {"index", "uuid", "watts"}:
            raise ZeusBSOConfigError(
                f"the command for power limits {template!r} has the fields {sorted(fields)}: it needs {{uuid}} or "
                "{index}, and {watts}, and no others"
            )
        self._device = device
        self._index: int | None = index if index is not None else getattr(device, "index", None)
        self._uuid: str | None = getattr(device, "uuid", None)
        if "uuid" in fields and not self._uuid:
            raise ZeusBSOConfigError(f"{device} has no UUID: use {{index}} in the command for power limits")
        if "index" in fields and self._index is None:
            raise ZeusBSOConfigError(f"{device} has no number of its own: pass index to CommandDevice")

    def __str__(self) -> str:
        return str(self._device)

    @property
    def uuid(self) -> str | None:
        """The GPU's, if the other device tells it."""
        return self._uuid

    def range_w(self) -> tuple[float, float]:
        """See `PowerLimitDevice.range_w`; the other device tells."""
        return self._device.range_w()

    def limit_w(self) -> float:
        """As the other device tells; see `PowerLimitDevice.limit_w`."""
        return self._device.limit_w()

    def enforced_limit_w(self) -> float:
        """As the other device tells; see `enforced_limit_w`."""
        return enforced_limit_w(self._device)

    def default_limit_w(self) -> float:
        """As the other device tells, watts."""
        return self._told("default_limit_w")

    def temperature_c(self) -> float:
        """As the other device tells, °C."""
        return self._told("temperature_c")

    def _told(self, what: str) -> float:
        tell: Callable[[], float] | None = getattr(self._device, what, None)
        if tell is None:
            raise PowerLimitUnavailableError(f"{self._device} has no {what}")
        return tell()

    def set_limit_w(self, limit_w: float) -> None:
        """Run the command; see `PowerLimitDevice.set_limit_w`."""
        command = [part.format(index=self._index, uuid=self._uuid, watts=f"{limit_w:.10g}") for part in self._arguments]
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command, split into arguments and run without a shell
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PowerLimitUnavailableError(f"{shlex.join(command)} could not be run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise PowerLimitUnavailableError(f"{shlex.join(command)} ended with status {done.returncode}: {said}")
