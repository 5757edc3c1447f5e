"""Declaration of every environment variable that the training side reads; no other module reads the environment.

An argument precedes its variable, and a variable its default. `zeus-plugins doctor` and docs/environment.md list
`VARIABLES`. A server in the training's process also reads `bso_server.settings`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.errors import ZeusBSOConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        meaning: Description of its value, as a noun phrase.
        default: Value if the variable is not set, in words.
        unit: Unit of a number.
        is_secret: Whether the value must not be shown.
    """

    name: str
    meaning: str
    default: str = "none"
    unit: str = ""
    is_secret: bool = False

    def __str__(self) -> str:
        return self.name

    def text(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the value in `environ` (the process's environment if None), or None if it is not set."""
        return (os.environ if environ is None else environ).get(self.name)

    def number(self, environ: Mapping[str, str] | None = None, *, is_positive: bool = False) -> float | None:
        """Return the value as a number (`is_positive`: finite and above 0), or None; raise `ZeusBSOConfigError`."""
        text = self.text(environ)
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isnan(number) or (is_positive and not 0 < number < math.inf):
            wanted = f"a finite number of {self.unit} above 0" if is_positive else "a number"
            raise ZeusBSOConfigError(
                f"the environment variable {self} is {text!r}: set it to {wanted}, {self.meaning}, or unset it"
            )
        return number

    def shown(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the value for display, a secret as ``(set)``; None if it is not set."""
        text = self.text(environ)
        return "(set)" if self.is_secret and text else text


# The server
SERVER_URL = Variable(
    "ZEUS_SERVER_URL",
    "the URL of the batch size optimization server",
    "a server in the training's process",
    is_secret=True,  # it may hold a password
)
TOKEN = Variable("ZEUS_BSO_TOKEN", "the server's access token", is_secret=True)
TOKEN_FILE = Variable("ZEUS_BSO_TOKEN_FILE", "the path of a file that holds the access token")
TIMEOUT_S = Variable(
    "ZEUS_BSO_TIMEOUT_S", "longest wait for a request to the server, with name lookup and retries", "10", "seconds"
)
STATE_DIRECTORY = Variable(
    "ZEUS_STATE_DIR",
    "the directory of results that wait for the server, and of measured power limits",
    "`zeus-plugins` in the user's state directory",
)
XDG_STATE_HOME = Variable("XDG_STATE_HOME", "the user's state directory, on Linux", "`~/.local/state`")
CERTIFICATES = Variable("SSL_CERT_FILE", "a file of certificates of authorities, for servers behind TLS", "`certifi`'s")
CERTIFICATE_DIRECTORY = Variable("SSL_CERT_DIR", "a directory of such certificates")

DISABLED = Variable("ZEUS_DISABLED", "`1` to turn the batch-size callbacks off for a run", "`0`")

# The job, or one run that a master launches
JOB_ID = Variable(
    "ZEUS_JOB_ID",
    "the job's id; in a launched run, the run's name",
    "derived from the training, or set by the server; in a launched run, such as `rec01+try01`",
)
JPY_SESSION_NAME = Variable(
    "JPY_SESSION_NAME", "the notebook's path, which Jupyter sets; part of a guessed job id", "`notebook`"
)
LOG_DIR = Variable("ZEUS_LOG_DIR", "the directory of a launched run's logs and results", "`zeus_log`")
TARGET_METRIC = Variable("ZEUS_TARGET_METRIC", "the target of a launched run: the validation metric that it must reach")
COST_THRESHOLD_J = Variable("ZEUS_COST_THRESH", "the maximum cost of a launched run", "`inf`", "joules")
ETA_KNOB = Variable("ZEUS_ETA_KNOB", "η of a launched run's cost, from 0 to 1", "0.5")
PROFILE_STEPS = Variable(
    "ZEUS_PROFILE_PARAMS",
    "the numbers of steps `warmup,measure` for each power limit that a launched run measures",
    "no change of power limits",
    "steps",
)
USE_BEST_POWER_LIMIT = Variable(
    "ZEUS_USE_OPTIMAL_PL", "a variable that must not be `False`: unset `ZEUS_PROFILE_PARAMS` in its place"
)

# Energy and power limits
ESTIMATED_POWER_W = Variable(
    "ZEUS_ESTIMATED_POWER_W",
    "the power of the whole machine at full load, for an estimate if no device measures it",
    "the GPUs' power limits if known, otherwise 65",
    "watts",
)
PRICE_PER_KWH = Variable("ZEUS_PRICE_PER_KWH", "the price of a kilowatt-hour, in any currency", unit="per kWh")
CO2_G_PER_KWH = Variable("ZEUS_CO2_G_PER_KWH", "the CO2 that the grid emits for a kilowatt-hour", unit="g per kWh")
POWER_LIMIT_COMMAND = Variable(
    "ZEUS_POWER_LIMIT_COMMAND", "the command that sets a GPU's power limit", "the driver sets it"
)
ZEUSD_SOCK_PATH = Variable(
    "ZEUSD_SOCK_PATH", "the socket of Zeus's daemon, for which `ZEUS_POWER_LIMIT_COMMAND` is set"
)
CUDA_VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", "the visible GPUs, by index, UUID or MIG id", "all")
CUDA_DEVICE_ORDER = Variable("CUDA_DEVICE_ORDER", "the order of CUDA's indices", "`FASTEST_FIRST`")

# Launchers of several processes
GROUP_RANK = Variable("GROUP_RANK", "the number of torchrun's agent; each machine has one agent")
LOCAL_RANK = Variable("LOCAL_RANK", "the process's number on its machine", "0")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", "the number of processes on the machine", "all of the training")


def access_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the server's access token or None; raise `ZeusBSOConfigError` if it is set twice or cannot be read."""
    value, path = TOKEN.text(environ), TOKEN_FILE.text(environ)
    if not path:
        return value
    if value:
        raise ZeusBSOConfigError(f"both {TOKEN} and {TOKEN_FILE} are set: unset one of them")
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ZeusBSOConfigError(f"{TOKEN_FILE}: the file cannot be read: {error}") from None
    if not token:
        raise ZeusBSOConfigError(f"{TOKEN_FILE}: the file {path} is empty")
    return token


_GONE = {
    "ZEUS_EMISSIONS_FILE": "trackers get zeus/energy_j and zeus/co2_g",
    "ZEUS_IDLE_POWER_W": "subtract its watts × zeus/time_s from zeus/energy_j",
    "ZEUS_PUE": f"multiply {PRICE_PER_KWH} and {CO2_G_PER_KWH} by it",
    "ZEUS_SUMMARY_FILE": "print callback.summary to a file, or read `bso-server jobs show JOB`",
}
"""Variables of earlier versions, each with what to do instead."""


def refuse_gone(environ: Mapping[str, str] | None = None) -> None:
    """Raise `ZeusBSOConfigError` if a variable of an earlier version is set."""
    for name, instead in _GONE.items():
        if (os.environ if environ is None else environ).get(name):
            raise ZeusBSOConfigError(f"{name} is no longer read: unset it; {instead}")


VARIABLES = tuple(each for each in globals().values() if isinstance(each, Variable))
"""All of them, in the order of their declaration."""
