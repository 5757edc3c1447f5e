"""GPUs with a settable power limit, and the ways to set it: NVML, a command, zeusd.

Any user may read a limit through NVML. Only root may set it, or in a container a process with CAP_SYS_ADMIN. A limit
lasts until the driver unloads (``nvmlDeviceSetPowerManagementLimit``, NVML's API reference).
"""

from __future__ import annotations

import http.client
import json
import shlex
import socket
import string
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol
from urllib.parse import urlencode

from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.nvml import DIE, MILLI, Nvml, installed_nvml, open_gpus
from zeus_plugins.environment import POWER_LIMIT_COMMAND, ZEUSD_SOCK_PATH, ZEUSD_TOKEN
from zeus_plugins.errors import ZeusBSOConfigError

COMMAND_VARIABLE = POWER_LIMIT_COMMAND.name

TOLERANCE_W = 1.0
"""Two limits that differ by at most this value are treated as equal, because some drivers round."""

# A driver may take some time to apply a limit.
_WAITS_S = (0.0, 0.02, 0.1)

_COMMAND_TIMEOUT_S = 30.0
_ZEUSD_TIMEOUT_S = 10.0


class PowerLimitUnavailableError(ZeusBSOConfigError):
    """No power limit can be read or set: no GPU, no permission, or a device that does not answer."""


class PowerLimitDevice(Protocol):
    """One GPU's power limit; `str()` names the GPU.

    An implementation can be pickled at any time, because another process restores the limit if this process is killed.
    Optional methods: ``enforced_limit_w()``, the limit that the GPU obeys, and ``default_limit_w()``, the limit after a
    start of the driver, both in watts; and ``temperature_c()``, in °C. All methods raise `PowerLimitUnavailableError`
    on failure.
    """

    @property
    def outlives_process(self) -> bool:
        """True if a limit stays in force after the end of this process and has to be restored."""

    def range_w(self) -> tuple[float, float]:
        """Return the lowest and the highest settable limit, in watts."""

    def limit_w(self) -> float:
        """Return the limit in force, in watts."""

    def set_limit_w(self, limit_w: float) -> None:
        """Set the limit, in watts."""


class PowerLimitNotAppliedError(PowerLimitUnavailableError):
    """A device accepted a limit, but another limit is in force."""


def set_and_check(device: PowerLimitDevice, limit_w: float) -> None:
    """Set a limit, in watts, and raise `PowerLimitNotAppliedError` if it was clamped or ignored."""
    device.set_limit_w(limit_w)
    for wait_s in _WAITS_S:
        time.sleep(wait_s)
        in_force_w = device.limit_w()
        if abs(in_force_w - limit_w) <= TOLERANCE_W:
            return
    raise PowerLimitNotAppliedError(
        f"{device} was given a power limit of {limit_w:g} W, and has one of {in_force_w:g} W in force"
    )


def enforced_limit_w(device: PowerLimitDevice) -> float:
    """Return the limit that a device obeys, in watts: another limiter may keep it below the set limit."""
    return float(getattr(device, "enforced_limit_w", device.limit_w)())


def default_limit_w(device: PowerLimitDevice) -> float | None:
    """Return the limit after a start of the driver, in watts; None if the device does not give it."""
    tell: Callable[[], float] | None = getattr(device, "default_limit_w", None)
    try:
        return None if tell is None else tell()
    except PowerLimitUnavailableError:
        return None


def temperature_c(devices: Sequence[PowerLimitDevice]) -> float | None:
    """Return the highest known temperature of the devices, in °C; None if none is known."""
    known = []
    for device in devices:
        tell: Callable[[], float] | None = getattr(device, "temperature_c", None)
        try:
            if tell is not None:
                known.append(tell())
        except Exception:  # nosec B112  # noqa: S112 - a sensor is optional
            continue
    return max(known, default=None)


def find_devices(
    device_indices: Sequence[int | str] | None = None, *, command: str | None = None, nvml: Nvml | None = None
) -> tuple[PowerLimitDevice, ...]:
    """Find the training's NVIDIA GPUs, each with its way to set the limit: a configured command or zeusd, else NVML.

    Args:
        device_indices: Indices among the visible GPUs, or UUIDs. None: all visible GPUs. Empty: no GPU.
        command: See `CommandDevice`. None: ``ZEUS_POWER_LIMIT_COMMAND`` if set, else zeusd if ``ZEUSD_SOCK_PATH`` is
            set.
        nvml: A replacement for the installed `pynvml`.

    Raises:
        PowerLimitUnavailableError: No GPU is available, or a GPU is a MIG slice.
        ZeusBSOConfigError: The GPUs are of several models, a named GPU does not exist, or the command is wrong.
    """
    command = command or POWER_LIMIT_COMMAND.text()
    if device_indices is not None and not device_indices:
        raise PowerLimitUnavailableError("the training runs on no NVIDIA GPU")
    try:
        devices = tuple(NvmlDevice(gpu.uuid, gpu.number(), str(gpu), nvml) for gpu in open_gpus(nvml, device_indices))
    except EnergyUnavailableError as error:
        raise PowerLimitUnavailableError(error.cause) from error
    if command:
        return tuple(CommandDevice(command, each) for each in devices)
    socket_path = ZEUSD_SOCK_PATH.text()
    return tuple(ZeusdDevice(socket_path, each) for each in devices) if socket_path else devices


@dataclass(eq=False)
class NvmlDevice:
    """A `PowerLimitDevice` over NVML; `index` is the GPU's number for ``nvidia-smi -i``, `name` is for messages."""

    outlives_process: ClassVar[bool] = True
    uuid: str
    index: int
    name: str
    nvml: Nvml | None = None

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
        self._ask(f"power limit of {limit_w:g} W", "nvmlDeviceSetPowerManagementLimit", round(limit_w * MILLI))

    def enforced_limit_w(self) -> float:
        """Return the limit that the driver enforces, in watts; if the driver gives none, the set limit."""
        try:
            return float(self._ask("limit in force", "nvmlDeviceGetEnforcedPowerLimit") / MILLI)
        except PowerLimitUnavailableError:
            return self.limit_w()

    def default_limit_w(self) -> float:
        """Return the limit after a start of the driver, in watts."""
        return float(self._ask("default limit", "nvmlDeviceGetPowerManagementDefaultLimit") / MILLI)

    def pci_address(self) -> str:
        """Return the PCI address, as ``domain:bus:device.function`` in hexadecimal digits."""
        address = self._ask("PCI address", "nvmlDeviceGetPciInfo").busId
        return address.decode() if isinstance(address, bytes) else str(address)

    def temperature_c(self) -> float:
        """Return the temperature of the GPU's die, in °C."""
        return float(self._ask("temperature", "nvmlDeviceGetTemperature", DIE))

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


class _OtherSetter:
    """The base of a `PowerLimitDevice` that reads through another device and sets the limit in its own way."""

    outlives_process = True

    def __init__(self, device: PowerLimitDevice) -> None:
        self._device = device
        self.uuid: str | None = getattr(device, "uuid", None)

    def __str__(self) -> str:
        return str(self._device)

    def range_w(self) -> tuple[float, float]:
        return self._device.range_w()

    def limit_w(self) -> float:
        return self._device.limit_w()

    def __getattr__(self, name: str) -> Any:
        if name in {"default_limit_w", "enforced_limit_w", "temperature_c"}:  # optional methods
            return getattr(self._device, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")


class CommandDevice(_OtherSetter):
    """A `PowerLimitDevice` that sets limits by a command, for machines on which a training may not set them itself.

    The command runs without a shell. It must end with status 0 within 30 s; otherwise the limit counts as not set.

    Args:
        template: The command, e.g. ``sudo -n nvidia-smi -i {uuid} -pl {watts}``. ``{uuid}`` is the GPU's UUID and
            ``{index}`` its number, both for ``nvidia-smi -i``, and ``{watts}`` the limit. In a container, numbers count
            only the container's GPUs, so a command that acts outside of the container needs the UUID.
        device: Reads the range and the limit in force.
        index: The number for ``{index}``. None: the number of `device`.

    Raises:
        ZeusBSOConfigError: The template cannot be parsed, has other fields, or lacks ``{watts}`` or a field for the
            GPU; or `device` has no value for this field.
    """

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
        super().__init__(device)
        self._index: int | None = index if index is not None else getattr(device, "index", None)
        if "uuid" in fields and not self.uuid:
            raise ZeusBSOConfigError(f"{device} has no UUID: use {{index}} in the command for power limits")
        if "index" in fields and self._index is None:
            raise ZeusBSOConfigError(f"{device} has no number of its own: pass index to CommandDevice")

    def set_limit_w(self, limit_w: float) -> None:
        """See `PowerLimitDevice.set_limit_w`."""
        command = [part.format(index=self._index, uuid=self.uuid, watts=f"{limit_w:.10g}") for part in self._arguments]
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


class ZeusdDevice(_OtherSetter):
    """A `PowerLimitDevice` that sets limits by zeusd, the daemon of the Zeus project.

    The daemon speaks HTTP on a Unix socket (https://ml.energy/zeus/zeusd/). It numbers all GPUs of the machine, but a
    container numbers only its own GPUs, so the daemon's number is looked up by the GPU's PCI address. An older daemon
    gives no addresses and is used only on a machine with one GPU.
    """

    def __init__(self, socket_path: str, device: NvmlDevice) -> None:
        super().__init__(device)
        self._socket_path = socket_path
        self._gpu = device

    def set_limit_w(self, limit_w: float) -> None:
        """See `PowerLimitDevice.set_limit_w`."""
        query = {"gpu_ids": self._number, "power_limit_mw": round(1000 * limit_w), "block": "true"}
        self._exchange("POST", f"/gpu/set_power_limit?{urlencode(query)}")

    @cached_property
    def _number(self) -> int:
        gpus = json.loads(self._exchange("GET", "/discover")).get("gpus", [])
        try:
            wanted = _pci(self._gpu.pci_address())
            numbers = [gpu["id"] for gpu in gpus if "pci_address" in gpu and _pci(gpu["pci_address"]) == wanted]
            if not numbers and len(gpus) == 1 and "pci_address" not in gpus[0]:
                numbers = [gpus[0]["id"]]
        except (KeyError, TypeError, ValueError) as error:
            raise PowerLimitUnavailableError(f"zeusd describes its GPUs in an unknown way: {error!r}") from error
        if len(numbers) != 1:
            raise PowerLimitUnavailableError(
                f"zeusd does not tell which of its {len(gpus)} GPUs is {self}: use a newer zeusd, which tells PCI "
                "addresses"
            )
        return int(numbers[0])

    def _exchange(self, method: str, path: str) -> str:
        token = ZEUSD_TOKEN.text()
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(_ZEUSD_TIMEOUT_S)
        try:
            connection.sock.connect(self._socket_path)
            connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise PowerLimitUnavailableError(f"zeusd does not answer on {self._socket_path}: {error}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise PowerLimitUnavailableError(f"zeusd refuses {path.partition('?')[0]} ({answer.status}): {text[:200]}")
        return text


def _pci(address: str) -> tuple[int, ...]:
    """Parse a PCI address; NVML writes its domain with eight digits, zeusd with four."""
    domain, bus, rest = address.split(":")
    device, _, function = rest.partition(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16)
