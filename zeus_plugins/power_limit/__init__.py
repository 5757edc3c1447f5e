"""Power limits: a training finds the best limit of its GPUs while it trains, and restores the initial limit at its end.

`PowerLimitProfiler` tries the limits one after another, each for some steps of the training itself (warm-up, then a
measurement window). A selector then chooses one limit, which stays until the training ends. The profiler does
not depend on a framework; a training loop calls it like this::

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

The constructor touches no device. An "epoch" is any stretch of steps without interruption, so a validation within an
epoch ends one stretch and begins another. An unfinished measurement is repeated in the next stretch. If no limit can be
set (no GPU, no permission), or a device or monitor fails, the profiling ends with a warning, and the training
continues. Without ``close``, the end of the process restores the
limits, even after SIGTERM and SIGKILL (`zeus_plugins.power_limit.guard`).
"""

from __future__ import annotations

from zeus_plugins.power_limit.devices import (
    NvmlDevice,
    PowerLimitDevice,
    PowerLimitUnavailableError,
    find_devices,
)
from zeus_plugins.power_limit.profile import PowerLimitProfile, PowerLimitSample
from zeus_plugins.power_limit.profiler import PowerLimitProfiler
from zeus_plugins.power_limit.selectors import Energy, MaxSlowdown, OptimumSelector, Time, ZeusCost

__all__ = [
    "Energy",
    "MaxSlowdown",
    "NvmlDevice",
    "OptimumSelector",
    "PowerLimitDevice",
    "PowerLimitProfile",
    "PowerLimitProfiler",
    "PowerLimitSample",
    "PowerLimitUnavailableError",
    "Time",
    "ZeusCost",
    "find_devices",
]
