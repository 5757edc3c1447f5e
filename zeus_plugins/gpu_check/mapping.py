"""Asks a process of its own which GPUs CUDA means by a value of ``CUDA_VISIBLE_DEVICES``.

Usage: ``python -m zeus_plugins.gpu_check.mapping``, with the variable set. Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from zeus_plugins.training.environment import CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES, environment_for

_TIMEOUT_S = 120.0


def ask(variables: Mapping[str, str]) -> dict[str, Any]:
    """The findings of a process with these variables, and no others that choose GPUs: `cuda`, `ours`, `problem`."""
    environ = environment_for(variables, without=(CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER))
    command = [sys.executable, "-m", "zeus_plugins.gpu_check.mapping"]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, on a module of ours
            command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"cuda": None, "ours": None, "problem": f"a process to ask could not be run: {error}"}
    return told


def _answer() -> dict[str, Any]:
    from zeus_plugins.energy.nvml_gpus import open_gpus
    from zeus_plugins.energy.visible import cuda_devices
    from zeus_plugins.errors import ZeusBSOConfigError

    ours: list[str] | None = None
    try:
        ours = [gpu.uuid for gpu in open_gpus()]  # before CUDA starts, so by the variable
    except ZeusBSOConfigError as error:
        return {"cuda": None, "ours": None, "problem": str(error)}
    try:
        torch = importlib.import_module("torch")
        torch.cuda.init()
    except Exception as error:  # PyTorch is absent, or without CUDA
        return {"cuda": None, "ours": ours, "problem": f"PyTorch cannot start CUDA: {error}"}
    known = cuda_devices(torch)
    return {
        "cuda": None if known is None else list(known),
        "ours": ours,
        "problem": None if known is not None else "this PyTorch tells no UUIDs",
    }


if __name__ == "__main__":
    print(json.dumps(_answer()))
