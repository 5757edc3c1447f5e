"""The GPUs of the machine that a training sees and uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus_plugins.energy.monitor import NoGpuError
from zeus_plugins.environment import CUDA_VISIBLE_DEVICES, Variable
from zeus_plugins.errors import ZeusBSOConfigError

MIG_PREFIX = "MIG-"


def visible_devices(setting: str | None, count: int) -> tuple[int | str, ...]:
    """Parse ``CUDA_VISIBLE_DEVICES`` on a machine with `count` GPUs into indices, UUIDs and ids of MIG slices.

    As in CUDA, the list ends at the first entry that names no GPU, so ``""``, ``-1`` and a scheduler's ``NoDevFiles``
    hide every GPU. None means that all are visible. Raise `NoGpuError` if no GPU is visible, and `ZeusBSOConfigError`
    if a GPU is named twice.
    """
    visible: list[int | str] = list(range(count)) if setting is None else []
    entries = [] if setting is None else [part.strip() for part in setting.split(",")]
    for entry in entries:
        if entry.startswith(("GPU-", MIG_PREFIX)):
            visible.append(entry)
        elif entry.isdecimal() and int(entry) < count:
            visible.append(int(entry))
        else:
            break
    if not visible:
        hidden = f", hidden by {CUDA_VISIBLE_DEVICES}={setting!r}" if count else ""
        raise NoGpuError(f"no GPU is visible: the driver lists {count}{hidden}")
    if len(set(visible)) < len(visible):
        raise ZeusBSOConfigError(f"{CUDA_VISIBLE_DEVICES} is {setting!r}: name each GPU once")
    return tuple(visible)


def cuda_devices(torch: Any) -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs, without prefix, in the order of PyTorch's CUDA indices.

    The environment variables may have changed since CUDA read them at its start, and CUDA may count the fastest GPU
    first. Return None if CUDA has not started in this process (a query would start it), or if PyTorch is absent or
    older than 2.4.
    """
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
    except (AttributeError, RuntimeError, AssertionError):  # an older PyTorch, or one without CUDA
        return None


def chosen_indices(wanted: Sequence[int] | None, visible: int) -> Sequence[int]:
    """Validate `wanted` against `visible` GPUs; return distinct indices, at least one, or all of them for None."""
    if wanted is None:
        return range(visible)
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(visible)):
        raise ZeusBSOConfigError(
            f"device_indices is {list(wanted)}: name one or more of the {visible} visible GPUs, counting from 0, each"
            " once, or pass None for all"
        )
    return wanted


def check_one_model(names: Sequence[str], listing: str, variable: Variable) -> None:
    """Raise `ZeusBSOConfigError` if GPUs are of several models; its message shows `listing` and `variable`."""
    if len(set(names)) > 1:
        raise ZeusBSOConfigError(
            f"the GPUs are of several models ({listing}), and costs measured on them do not compare: choose the GPUs "
            f"of one model by device_indices or {variable}"
        )
