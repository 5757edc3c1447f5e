"""Power limits set by zeusd, the daemon of the Zeus project, for trainings that may not set them themselves.

The daemon listens on a socket of the machine and speaks HTTP; https://ml.energy/zeus/zeusd/ has its interface.
"""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlencode

from zeus_plugins.power_limit.devices import PowerLimitUnavailableError
from zeus_plugins.power_limit.nvml import NvmlDevice
from zeus_plugins.training.environment import ZEUSD_TOKEN

_TIMEOUT_S = 10.0


class ZeusdDevice:
    """A `PowerLimitDevice` that reads as an NVIDIA GPU does and sets by zeusd.

    The daemon counts the GPUs of the whole machine, and a container some of them. The GPU is therefore named by the
    number that the daemon has for its PCI address or, where an older one tells none, only if the machine has one GPU.

    Args:
        socket_path: The daemon's socket, e.g. ``/run/zeusd/zeusd.sock``.
        device: Reads the range and the limit in force.
    """

    outlives_process = True

    def __init__(self, socket_path: str, device: NvmlDevice) -> None:
        self._socket_path = socket_path
        self._device = device
        self._number: int | None = None

    def __str__(self) -> str:
        return str(self._device)

    @property
    def uuid(self) -> str:
        """The GPU's."""
        return self._device.uuid

    def range_w(self) -> tuple[float, float]:
        """See `PowerLimitDevice.range_w`; the driver tells."""
        return self._device.range_w()

    def limit_w(self) -> float:
        """See `PowerLimitDevice.limit_w`; the driver tells."""
        return self._device.limit_w()

    def enforced_limit_w(self) -> float:
        """As the driver tells; see `NvmlDevice.enforced_limit_w`."""
        return self._device.enforced_limit_w()

    def default_limit_w(self) -> float:
        """As the driver tells; see `NvmlDevice.default_limit_w`."""
        return self._device.default_limit_w()

    def temperature_c(self) -> float:
        """As the driver tells; see `NvmlDevice.temperature_c`."""
        return self._device.temperature_c()

    def set_limit_w(self, limit_w: float) -> None:
        """Have the daemon set it; see `PowerLimitDevice.set_limit_w`."""
        if self._number is None:
            self._number = self._found()
        query = {"gpu_ids": self._number, "power_limit_mw": round(1000 * limit_w), "block": "true"}
        self._exchange("POST", f"/gpu/set_power_limit?{urlencode(query)}")

    def _found(self) -> int:
        """The daemon's number of this GPU."""
        gpus = json.loads(self._exchange("GET", "/discover")).get("gpus", [])
        try:
            wanted = _pci(self._device.pci_address())
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
        connection = _UnixConnection(self._socket_path)
        token = ZEUSD_TOKEN.text()
        try:
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


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._socket_path = socket_path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock: Any = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def _pci(address: str) -> tuple[int, ...]:
    """The numbers of a PCI address: NVML writes its domain with eight digits, others with four."""
    domain, bus, rest = address.split(":")
    device, _, function = rest.partition(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16)
