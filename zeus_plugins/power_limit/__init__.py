"""The second knob: a training finds its GPUs' best power limit while it trains, and leaves the GPUs as they were.

`PowerLimitProfiler` tries the power limits one after another, each for some steps of the training itself (warm-up, then
a measurement window), chooses one of them by a selector, keeps it until the training ends, and then puts back the
limits that it found. It knows no framework. A training loop calls it like this::

    profiler = PowerLimitProfiler(find_devices, ZeusCost(eta=0.5), warmup_steps=10, profile_steps=40, monitor=auto())
    try:
        for epoch in range(epochs):
            profiler.on_epoch_begin(len(loader))
            for batch in loader:
                train(batch)
                if not profiler.is_done:
                    profiler.on_step_end()
            profiler.on_epoch_end()
            validate()
    finally:
        profiler.close()

The constructor touches no device. An "epoch" is any stretch of steps that nothing else interrupts, so a validation
within an epoch ends one stretch and begins another; a measurement that was cut short is made again in the next. Calls
in any other order do no harm. If nobody calls ``close``, the end of the process puts the limits back, SIGTERM and
SIGKILL included (`zeus_plugins.power_limit.guard`).

Where no limit can be set (no GPU, no permission), the profiler measures the limit in force, says so in one warning, and
chooses nothing. A device or monitor that fails later ends the profiling, with one warning, and not the training.
"""

from __future__ import annotations

from zeus_plugins.power_limit.devices import (
    COMMAND_VARIABLE,
    CommandDevice,
    NvmlDevice,
    PowerLimitDevice,
    PowerLimitUnavailableError,
    find_devices,
)
from zeus_plugins.power_limit.plan import Done, Profiling, Ready, State, Warmup, Window, limits_between
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.profiler import PowerLimitProfiler
from zeus_plugins.power_limit.replay import ReplayDevice, ReplayMachine, ReplayPoint
from zeus_plugins.power_limit.selectors import Energy, MaxSlowdown, OptimumSelector, Time, ZeusCost
from zeus_plugins.protocol import PowerLimitSample

__all__ = [
    "COMMAND_VARIABLE",
    "CommandDevice",
    "Done",
    "Energy",
    "MaxSlowdown",
    "NvmlDevice",
    "OptimumSelector",
    "PowerLimitDevice",
    "PowerLimitProfile",
    "PowerLimitProfiler",
    "PowerLimitSample",
    "PowerLimitUnavailableError",
    "Profiling",
    "Ready",
    "ReplayDevice",
    "ReplayMachine",
    "ReplayPoint",
    "State",
    "Time",
    "Warmup",
    "Window",
    "ZeusCost",
    "find_devices",
    "limits_between",
]
