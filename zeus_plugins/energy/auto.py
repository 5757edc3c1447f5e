"""The choice of a monitor for this machine."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence

from zeus_plugins.energy.estimate import EstimateMonitor
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError
from zeus_plugins.energy.nvml import Nvml, NvmlMonitor
from zeus_plugins.errors import ZeusBSOConfigError

__all__ = ["DEFAULT_ESTIMATED_POWER_W", "POWER_VARIABLE", "auto"]

logger = logging.getLogger("zeus_plugins.energy")

POWER_VARIABLE = "ZEUS_ESTIMATED_POWER_W"

DEFAULT_ESTIMATED_POWER_W = 65.0
"""Watts assumed where nothing is measured and nobody states better ones.

65 W is the usual thermal design power class of a desktop CPU package (and of a share of a server's): the right order of
magnitude for a training on a CPU, and a convention rather than a measurement.
"""


def auto(
    estimated_power_w: float | None = None,
    *,
    device_indices: Sequence[int] | None = None,
    nvml: Nvml | None = None,
) -> EnergyMonitor:
    """Choose a monitor: the GPUs' energy counters where there are any, else an estimate that says so.

    A fallback is logged as a warning, once per process for each cause. The monitor returned is unused and can be
    pickled.

    Args:
        estimated_power_w: Watts to assume without a counter. None: those in the environment variable
            ``ZEUS_ESTIMATED_POWER_W``, else `DEFAULT_ESTIMATED_POWER_W`.
        device_indices: Which of the visible GPUs train, counting from 0. None: all of them. Empty: none, the training
            uses another device, so that an idle GPU beside it must not be measured.
        nvml: What to call instead of the installed `pynvml`.

    Raises:
        ZeusBSOConfigError: The visible GPUs cannot be measured together, or the watts to assume make no sense.
    """
    try:
        if device_indices is not None and not device_indices:
            raise EnergyUnavailableError("the training uses no GPU")
        NvmlMonitor(device_indices, nvml=nvml).gpus()
    except EnergyUnavailableError as unavailable:
        power_w = estimated_power_w if estimated_power_w is not None else _power_from_environment_w()
        monitor = EstimateMonitor(power_w)
        _warn_of_estimate(unavailable.cause, power_w)
        return monitor
    return NvmlMonitor(device_indices, nvml=nvml)


def _power_from_environment_w() -> float:
    text = os.environ.get(POWER_VARIABLE)
    if text is None:
        return DEFAULT_ESTIMATED_POWER_W
    try:
        power_w = float(text)
    except ValueError:
        power_w = math.nan
    if not (math.isfinite(power_w) and power_w > 0):
        raise ZeusBSOConfigError(
            f"the environment variable {POWER_VARIABLE} is {text!r}: set it to the watts that the machine draws while"
            " training, a finite number above 0, or unset it"
        )
    return power_w


@functools.cache  # a recurring cause is told once
def _warn_of_estimate(cause: str, power_w: float) -> None:
    logger.warning(
        "No energy counter found (%s): energy is estimated as %g W × time, not measured. State the watts that this"
        " machine really draws by the environment variable %s or by energy_monitor=EstimateMonitor(power_w=...).",
        cause,
        power_w,
        POWER_VARIABLE,
    )
