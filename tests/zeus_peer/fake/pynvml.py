"""Two simulated GPUs for programs that measure with NVIDIA's management library.

The module comes first on the import path, before nvidia-ml-py's module of the same name. It takes the constants and
error classes of the real module and answers the calls that need a driver. Energy rises by the same amount with each
reading, independently of the time.
"""
# ruff: noqa: N802, ARG001 - the names and the arguments are NVIDIA's

from __future__ import annotations

import itertools
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from sys import path
from typing import Any

GPUS = 2
NAME = "Tesla V100-SXM2-32GB"
POWER_LIMITS_MW = (100_000, 300_000)
READING_MJ = 100_000

_energy_mj = [itertools.count(READING_MJ, READING_MJ) for _ in range(GPUS)]


def _behind_this_one() -> dict[str, Any]:
    here = Path(__file__).parent
    spec = PathFinder.find_spec("pynvml", [entry for entry in path if Path(entry).resolve() != here])
    assert spec is not None, "nvidia-ml-py is not installed"
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


globals().update(_behind_this_one())


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return GPUS


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return NAME


def nvmlDeviceGetArchitecture(handle: int) -> int:
    volta: int = globals()["NVML_DEVICE_ARCH_VOLTA"]
    return volta


def nvmlDeviceGetPowerManagementLimitConstraints(handle: int) -> list[int]:
    return list(POWER_LIMITS_MW)


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    return next(_energy_mj[handle])
