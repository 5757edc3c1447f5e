"""Puts back limits that trainings have left behind, for whoever asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeus_plugins.power_limit import records
from zeus_plugins.power_limit.devices import (
    PowerLimitDevice,
    PowerLimitUnavailableError,
    default_limit_w,
    set_and_check,
)


@dataclass(frozen=True)
class Reset:
    """One GPU's limits, watts: that in force, and the one that it was to get; the problem, if it did not."""

    device: PowerLimitDevice
    found_w: float | None
    wanted_w: float | None
    problem: str | None = None


def reset_limits(devices: Sequence[PowerLimitDevice]) -> Iterator[Reset]:
    """Give each GPU the limit that it had before a training that left its own behind, else its default limit."""
    for device in devices:
        found_w = wanted_w = None
        uuid = getattr(device, "uuid", None)
        try:
            found_w, record = device.limit_w(), records.recall(uuid)
            is_left_behind = record is not None and record.holds(found_w)
            wanted_w = record.original_w if record is not None and is_left_behind else default_limit_w(device)
            if wanted_w is None:
                raise PowerLimitUnavailableError(f"{device} does not tell its default limit")
            set_and_check(device, wanted_w)
        except PowerLimitUnavailableError as error:
            yield Reset(device, found_w, wanted_w, str(error))
        else:
            records.forget(uuid)
            yield Reset(device, found_w, wanted_w)
