"""What the callbacks of all frameworks decide alike. Knows no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import JobSpec, ReportResponse
from zeus_plugins.training.loaders import BatchSplit, split_batch

__all__ = ["check_options", "decided_by_rank_zero", "failure", "splits_of_job"]

T = TypeVar("T")


def check_options(*, on_failure: str, max_per_device: int | None) -> None:
    """Refuse arguments of a callback that cannot work.

    Raises:
        ZeusBSOConfigError: One of them.
    """
    if on_failure not in ("raise", "stop"):
        raise ZeusBSOConfigError(f"on_failure is {on_failure!r}: choose 'raise' or 'stop'")
    if max_per_device is not None and max_per_device < 1:
        raise ZeusBSOConfigError(f"max_per_device_batch_size is {max_per_device}: it is at least 1")


def splits_of_job(
    job: JobSpec, *, devices: int, accumulation: int, max_per_device: int | None
) -> dict[int, BatchSplit]:
    """How each of the job's sizes is spread, all checked before a trial is spent on one that cannot be.

    Args:
        job: Its batch sizes are global.
        devices: Number of devices that train on different data.
        accumulation: Accumulated batches per step that the user asked for.
        max_per_device: Largest batch that a device holds. None: no limit.

    Raises:
        ZeusBSOConfigError: Sizes that cannot be spread evenly.
    """
    splits = {
        batch_size: split_batch(
            batch_size, world_size=devices, accumulation=accumulation, max_per_device=max_per_device
        )
        for batch_size in job.batch_sizes
    }
    uneven = [batch_size for batch_size, split in splits.items() if split is None]
    if uneven:
        raise ZeusBSOConfigError(
            f"the batch sizes {uneven} cannot be spread evenly over {devices} devices × {accumulation} accumulated "
            "batches: batch sizes are global, samples per optimizer step over all devices; choose multiples of "
            f"{devices * accumulation}"
        )
    return {batch_size: split for batch_size, split in splits.items() if split is not None}


def decided_by_rank_zero(decide: Callable[[], T], *, rank: int, world_size: int, broadcast: Callable[[Any], Any]) -> T:
    """Let rank 0 decide, and give every rank its answer or its error; a rank that raised alone would hang the rest.

    Args:
        decide: Called on rank 0 only. The answer must be picklable.
        rank: Of this process.
        world_size: Number of processes, all of which make this call.
        broadcast: Takes an object and returns that of rank 0.

    Raises:
        Exception: What `decide` raised, on every rank.
    """
    if world_size == 1:
        return decide()
    outcome: tuple[Any, Exception | None] = (None, None)
    if rank == 0:
        try:
            outcome = (decide(), None)
        except Exception as error:
            outcome = (None, error)
    answer, failed = broadcast(outcome)
    if failed is not None:
        raise failed
    return cast("T", answer)


def failure(verdict: ReportResponse | None) -> str | None:
    """Why a trial whose training has ended failed, or None when it reached its target."""
    if verdict is None or not verdict.stop_train:
        return "the training ended before the target was reached"
    return None if verdict.converged else verdict.message
