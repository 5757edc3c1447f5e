"""The limits to try, by what the ranks of a training tell each other of their devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import (
    TOLERANCE_W,
    PowerLimitDevice,
    PowerLimitNotAppliedError,
    PowerLimitUnavailableError,
    default_limit_w,
    enforced_limit_w,
    limits_between,
    set_and_check,
)
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.protocol import GpuConfig

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True)
class RankSetup:
    """One rank's devices and earlier measurements, as all ranks hear of them before the first limit is tried."""

    problem: str | None
    range_w: tuple[float, float] | None
    initial_limits_w: tuple[float, ...]
    gpus: GpuConfig | None
    profile: PowerLimitProfile | None
    is_exact: bool


@dataclass(frozen=True)
class Outcome:
    """The outcome of one action on one rank; a limit `is_refused` that a device accepts and does not put in force."""

    problem: str | None = None
    measured: Measurement | None = None
    is_refused: bool = False


def problem_in(ranks: Sequence[Outcome]) -> str | None:
    """The first problem that a rank has, if any has one."""
    return next((rank.problem for rank in ranks if rank.problem is not None), None)


def range_of(devices: Sequence[PowerLimitDevice], initial_w: Sequence[float]) -> tuple[float, float]:
    """The range that all devices have, watts; a limit that was left behind is a warning.

    Raises:
        PowerLimitUnavailableError: A device does not let its limit be set.
    """
    if not devices:
        raise PowerLimitUnavailableError("there is no GPU whose power limit could be set")
    lows_w, highs_w = zip(*(device.range_w() for device in devices), strict=True)
    ceilings_w = list(highs_w)
    for device, limit_w in zip(devices, initial_w, strict=True):
        in_force_w, usual_w = device.limit_w(), default_limit_w(device)
        set_and_check(device, in_force_w)  # it changes nothing, and shows whether it may be done
        obeyed_w = enforced_limit_w(device)
        # Where another limiter is below the limit that was set, higher ones would be measured under a wrong name.
        if obeyed_w < in_force_w - TOLERANCE_W:
            ceilings_w.append(obeyed_w)
        if usual_w is not None and limit_w < usual_w - TOLERANCE_W:
            _logger.warning(
                "%s has a power limit of %g W in force, below its default of %g W, and none above it is tried. Should "
                "a training have left it behind, `zeus-plugins doctor --reset-power-limits` puts the default back",
                *(device, limit_w, usual_w),
            )
    return max(lows_w), min(ceilings_w)


def limits_to_try(ranks: Sequence[RankSetup], limits_w: Sequence[float] | None) -> tuple[float, ...]:
    """The limits that compete, watts of each GPU.

    Raises:
        PowerLimitUnavailableError: A rank cannot set limits, or none has a GPU.
        ZeusBSOConfigError: Limits were listed that the GPUs cannot have.
    """
    ranges_w = [rank.range_w for rank in ranks if rank.range_w is not None]
    problem = next((rank.problem for rank in ranks if rank.problem is not None), None)
    if problem is not None or not ranges_w:
        raise PowerLimitUnavailableError(problem or "no rank controls a GPU")
    lowest_w, highest_w = max(low_w for low_w, _ in ranges_w), min(high_w for _, high_w in ranges_w)
    if limits_w is None:
        return limits_between(lowest_w, min(highest_w, *initial_limits_w(ranks)))
    outside = [limit_w for limit_w in limits_w if not lowest_w - _ROUNDING_W <= limit_w <= highest_w + _ROUNDING_W]
    if outside:
        raise ZeusBSOConfigError(
            f"limits_w has {outside}, which the GPUs cannot have: they take {lowest_w:g} W to {highest_w:g} W"
        )
    return tuple(limits_w)


# Limits of drivers are whole milliwatts.
_ROUNDING_W = 0.001


def initial_limits_w(ranks: Sequence[RankSetup]) -> list[float]:
    """The limits that all devices had at first, watts."""
    return [limit_w for rank in ranks for limit_w in rank.initial_limits_w]


def put_in_force(devices: Sequence[PowerLimitDevice], limit_w: float) -> Outcome:
    """Set a limit, watts, on all devices, and see that they obey it. It never raises."""
    try:
        for device in devices:
            set_and_check(device, limit_w)
            obeyed_w = enforced_limit_w(device)
            if obeyed_w < limit_w - TOLERANCE_W:
                raise PowerLimitNotAppliedError(f"{device} obeys {obeyed_w:g} W, not the {limit_w:g} W that were set")
    except Exception as error:
        return Outcome(str(error) or type(error).__name__, is_refused=isinstance(error, PowerLimitNotAppliedError))
    return Outcome()
