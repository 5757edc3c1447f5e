"""The GPUs of the machine that a training sees and uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus_plugins.energy.monitor import NoGpuError
from zeus_plugins.environment import CUDA_VISIBLE_DEVICES, Variable
from zeus_plugins.errors import ZeusBSOConfigError

MIG_PREFIX = "MIG-"


def visible_devices(setting: str | None, count: int) -> tuple[int | str, ...]:
    """Read ``CUDA_VISIBLE_DEVICES`` as CUDA does: up to the first entry that names no GPU.

    That rule is what makes ``""``, ``-1`` and a scheduler's ``NoDevFiles`` hide every GPU. Without a setting (None) all
    GPUs are visible, as many as `count`. The answer has the index or UUID of each, or the id of a MIG slice.

    Raises:
        NoGpuError: No GPU is visible.
        ZeusBSOConfigError: The setting names a GPU twice.
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
    """The GPUs in CUDA's own order, by their UUIDs without a prefix.

    CUDA has read the variables when it started, whatever they say now, and may count its fastest GPU first.

    Args:
        torch: PyTorch, or None where this process has not loaded it.

    Returns:
        None where CUDA has not started in this process (asking would start it), or does not tell (before PyTorch 2.4).
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
    """Refuse GPUs of several models; the listing shows them, and the variable chooses among them."""
    if len(set(names)) > 1:
        raise ZeusBSOConfigError(
            f"the GPUs are of several models ({listing}), and costs measured on them do not compare: choose those of"
            f" one model by device_indices or {variable}"
        )
