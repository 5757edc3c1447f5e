"""Notes on figures of NVIDIA's GPUs: whose energy they are, besides this training's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH, Measurement
from zeus_plugins.energy.nvml_gpus import NvmlGpu

GPU_SCOPE, MODULE_SCOPE = "GPU scope", "module scope"
"""Of a superchip (GH200, GB200), NVML counts the GPU alone or the whole module, with its CPU and memory."""

# NVML's own numbers: NVML_FI_DEV_POWER_AVERAGE, NVML_POWER_SCOPE_GPU and NVML_POWER_SCOPE_MODULE.
_POWER_AVERAGE, _OF_GPU, _OF_MODULE = 185, 0, 1

_MILLI = 1000

# Two scopes that differ by less are one: the module of a GPU alone is the GPU.
_DIFFERENT = 1.02

logger = logging.getLogger("zeus_plugins.energy")


class NvmlNotes:
    """Adds to measurements of some GPUs their scope, and that others have used the GPUs, too."""

    def __init__(self, gpus: Sequence[NvmlGpu]) -> None:
        self._gpus = gpus
        self._scope: str | None = None
        self._has_warned = False

    def on(self, measured: Measurement) -> Measurement:
        """The same measurement with a source that tells. Call it when a window ends, while the training still runs."""
        if self._scope is None:
            self._scope = next(filter(None, map(scope_of, self._gpus)), "")
        notes = [self._scope] if self._scope else []
        sharing = {str(gpu): others for gpu in self._gpus if (others := other_processes(gpu))}
        if sharing:
            notes.append("shared with other processes")
            self._warn_of(sharing)
        return replace(measured, source=", ".join([measured.source, *notes])[:MAX_SOURCE_LENGTH]) if notes else measured

    def _warn_of(self, sharing: dict[str, int]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        told = ", ".join(f"{others} on {gpu}" for gpu, others in sharing.items())
        logger.warning(
            "other processes compute beside this training (%s): its energy is theirs, too, and the cost of its batch "
            "size depends on them",
            told,
        )


def scopes_in(sources: Iterable[str]) -> list[int]:
    """The number of sources that are about GPUs alone, and that of those about their modules."""
    told = list(sources)
    return [sum(scope in source for source in told) for scope in (GPU_SCOPE, MODULE_SCOPE)]


def other_processes(gpu: NvmlGpu) -> int:
    """The number of processes that compute on a GPU beside the one of this training; 0 where the driver tells none.

    A training has one process on each GPU. In a container the driver tells the numbers of processes as they are
    outside of it, or no processes at all.
    """
    most = 0
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
        try:
            pids = {process.pid for process in getattr(gpu.nvml, name)(gpu.handle)}
        except (gpu.nvml.NVMLError, AttributeError):
            continue
        most = max(most, len(pids - {os.getpid()}) if os.getpid() in pids else len(pids) - 1)
    return most


def scope_of(gpu: NvmlGpu) -> str:
    """The part of a superchip that a GPU's plain readings are about; empty where there is only one.

    NVML does not tell it for the counter, so it is that of the two scopes whose power is closer to the plain reading.
    """
    of_gpu_w, of_module_w = power_in(gpu, _OF_GPU), power_in(gpu, _OF_MODULE)
    if not of_gpu_w or not of_module_w or of_module_w < _DIFFERENT * of_gpu_w:
        return ""
    try:
        plain_w = gpu.nvml.nvmlDeviceGetPowerUsage(gpu.handle) / _MILLI
    except gpu.nvml.NVMLError:
        return ""
    return MODULE_SCOPE if abs(plain_w - of_module_w) < abs(plain_w - of_gpu_w) else GPU_SCOPE


def power_in(gpu: NvmlGpu, scope: int, field: int = _POWER_AVERAGE) -> float | None:
    """The power in a scope, in watts; None where the driver does not tell it."""
    try:
        (answer,) = gpu.nvml.nvmlDeviceGetFieldValues(gpu.handle, [(field, scope)])
    except (gpu.nvml.NVMLError, AttributeError):
        return None
    return answer.value.uiVal / _MILLI if answer.nvmlReturn == 0 else None
