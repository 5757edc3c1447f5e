"""Makes existing torch data loaders deliver another batch size.

Loaders are changed in place: making new ones from the old fails for subclasses and for arguments given by position.
Nothing here imports torch; a loader is whatever has a `batch_sampler` or a `batch_size`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.patches import Patches


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """The spread of one optimizer step's samples.

    Attributes:
        per_device: Samples in one batch of one device's loader.
        accumulation: Batches whose gradients are summed before a step.
    """

    per_device: int
    accumulation: int


def split_batch(
    global_batch_size: int, *, world_size: int, accumulation: int = 1, max_per_device: int | None = None
) -> BatchSplit | None:
    """Spread a global batch size: ``global = per_device · world_size · accumulation``.

    Args:
        global_batch_size: Samples per optimizer step over all devices.
        world_size: Number of devices.
        accumulation: Accumulation that the user asked for; raised as far as `max_per_device` needs.
        max_per_device: Largest batch that a device holds. None: no limit.

    Returns:
        The split with the least accumulation, or None when the size cannot be spread evenly.
    """
    per_device_step, remainder = divmod(global_batch_size, world_size)
    if remainder:
        return None
    if max_per_device is None:
        candidates = range(accumulation, accumulation + 1)
    else:
        candidates = range(accumulation, per_device_step + 1)
    for steps in candidates:
        per_device, remainder = divmod(per_device_step, steps)
        if remainder == 0 and (max_per_device is None or per_device <= max_per_device):
            return BatchSplit(per_device, steps)
    return None


def scaled_together(sizes: Sequence[int], largest: int) -> list[int]:
    """Batch sizes of several loaders in the proportion of these, the largest being `largest`.

    Raises:
        ZeusBSOConfigError: One would not be whole.
    """
    before = max(sizes)
    if any(size * largest % before for size in sizes):
        raise ZeusBSOConfigError(
            f"the train loaders mix {':'.join(map(str, sizes))} samples, which cannot become {largest} in the same "
            f"proportion: choose batch sizes that are multiples of {before // math.gcd(*sizes)} for each device"
        )
    return [size * largest // before for size in sizes]


def resize_loader(loader: Any, batch_size: int, patches: Patches) -> None:
    """Make a loader deliver `batch_size` samples at a time from its next iteration on.

    Args:
        loader: A torch DataLoader or something with the same attributes.
        batch_size: Samples per batch of this loader.
        patches: Takes note of every change.

    Raises:
        ZeusBSOConfigError: The loader does not batch, so that its batches cannot change.
    """
    delivered = delivered_batch_size(loader)
    if delivered == batch_size:
        return
    if delivered is None:
        raise _sizeless(loader, batch_size)
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is not None:
        patches.set_attribute(batch_sampler, "batch_size", batch_size)
    if getattr(loader, "batch_size", None) is not None:
        patches.set_attribute(loader, "batch_size", batch_size)


def delivered_batch_size(loader: Any) -> int | None:
    """The number of samples in a batch of this loader, or None when it does not say."""
    for batcher in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(batcher, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def resize_process_loader(loader: Any, batch_size: int, processes: int, patches: Patches) -> None:
    """Make the loader of one of several processes, as accelerate prepares it, deliver `batch_size` to that process.

    Accelerate puts samplers around samplers, each of which keeps a batch size; where it splits batches over the
    processes, that size is the one of all processes together.

    Args:
        loader: What accelerate's `prepare` returned, or a loader that it never saw.
        batch_size: Samples per batch for each process.
        processes: Number of processes that get different data.
        patches: Takes note of every change.

    Raises:
        ZeusBSOConfigError: The loader does not batch, so that its batches cannot change.
    """
    batchers = _batchers(loader)
    # A sampler that says no size may have read it from the trainer's arguments; its batches are counted.
    if not batchers and getattr(getattr(loader, "base_dataloader", loader), "batch_sampler", None) is None:
        raise _sizeless(loader, batch_size)
    for batcher, is_shared in batchers:
        patches.set_attribute(batcher, "batch_size", batch_size * processes if is_shared else batch_size)


def process_batch_sizes(loader: Any, processes: int) -> set[float]:
    """The batch sizes that the parts of a loader as in `resize_process_loader` would deliver; one, if they agree."""
    return {batcher.batch_size / (processes if is_shared else 1) for batcher, is_shared in _batchers(loader)}


def _batchers(loader: Any) -> list[tuple[Any, bool]]:
    """All that keeps a batch size in a loader, and whether it is the one of all processes together."""
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper only passes on
    is_shared = getattr(loader, "split_batches", False)
    found: list[tuple[Any, bool]] = [(inner, is_shared)]
    batcher = getattr(inner, "batch_sampler", None)
    if batcher is None:
        batcher = getattr(inner, "sampler", None)
    while batcher is not None:
        is_shared = is_shared or getattr(batcher, "split_batches", False)
        found.append((batcher, is_shared))
        batcher = getattr(batcher, "batch_sampler", None)
    dataset: Any = getattr(inner, "dataset", None)
    if hasattr(dataset, "split_batches"):  # accelerate's share of a stream
        found.append((dataset, dataset.split_batches))
    return [(each, is_shared) for each, is_shared in found if isinstance(getattr(each, "batch_size", None), int)]


def _sizeless(loader: Any, batch_size: int) -> ZeusBSOConfigError:
    return ZeusBSOConfigError(
        f"the training data ({type(loader).__name__}) does not say how many samples it puts into a batch, so its "
        f"batch size cannot be set to {batch_size}: give a torch DataLoader with batch_size= or with a batch "
        "sampler that has a batch_size"
    )
