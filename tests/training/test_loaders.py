from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.support import lightning_models as models
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.batches import BatchSplit, delivered_batch_size, resize_loader, split_batch
from zeus_plugins.training.patches import Patches

sizes = st.integers(1, 10_000)


@pytest.mark.parametrize(
    ("global_batch_size", "options", "split"),
    [
        (48, {"world_size": 1}, BatchSplit(48, 1)),
        (48, {"world_size": 2}, BatchSplit(24, 1)),
        (48, {"world_size": 2, "accumulation": 4}, BatchSplit(6, 4)),
        (48, {"world_size": 1, "max_per_device": 48}, BatchSplit(48, 1)),
        (48, {"world_size": 1, "max_per_device": 20}, BatchSplit(16, 3)),
        (48, {"world_size": 2, "max_per_device": 8}, BatchSplit(8, 3)),
        (48, {"world_size": 1, "accumulation": 5, "max_per_device": 20}, BatchSplit(8, 6)),
        (7, {"world_size": 1, "max_per_device": 3}, BatchSplit(1, 7)),
        (48, {"world_size": 5}, None),
        (48, {"world_size": 1, "accumulation": 5}, None),
        (2, {"world_size": 4}, None),
        (2, {"world_size": 1, "accumulation": 4, "max_per_device": 8}, None),
    ],
)
def test_a_global_size_is_spread(global_batch_size: int, options: dict[str, int], split: BatchSplit | None) -> None:
    assert split_batch(global_batch_size, **options) == split


@given(global_batch_size=sizes, world_size=st.integers(1, 8), accumulation=st.integers(1, 8), limit=st.none() | sizes)
def test_a_split_adds_up_and_accumulates_no_more_than_needed(
    global_batch_size: int, world_size: int, accumulation: int, limit: int | None
) -> None:
    split = split_batch(global_batch_size, world_size=world_size, accumulation=accumulation, max_per_device=limit)
    if limit is None:
        possible = [accumulation] if global_batch_size % (world_size * accumulation) == 0 else []
    else:
        possible = [
            steps
            for steps in range(accumulation, global_batch_size + 1)
            if global_batch_size % (world_size * steps) == 0 and global_batch_size <= limit * world_size * steps
        ]
    assert (split is None) == (possible == [])
    if split is not None:
        assert split.accumulation == possible[0]
        assert split.per_device * world_size * split.accumulation == global_batch_size


def images_per_batch(loader: Iterable[Any]) -> list[int]:
    return [len(images) for images, _ in loader]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": models.train_loader,
    "subclass": lambda: models.LoaderWithSurcharge(0.5),
    "batch sampler": models.batch_sampler_loader,
    "stream": models.stream_loader,
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_a_loader_delivers_another_size_until_that_is_undone(make: Callable[[], DataLoader[Any]]) -> None:
    loader, patches = make(), Patches()
    resize_loader(loader, 48, patches)
    assert delivered_batch_size(loader) == 48
    assert loader.batch_size in (48, None)
    assert images_per_batch(loader) == [48, 48, 48, 24]
    patches.undo()
    assert delivered_batch_size(loader) == 16
    assert images_per_batch(loader) == [16] * 10 + [8]


# Python 3.12 and newer warn of forking beside threads; torch has some, and its workers do not touch them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_that_stay_deliver_the_size_too() -> None:
    loader = DataLoader(models.digits()[0], batch_size=16, num_workers=1, persistent_workers=True)
    assert images_per_batch(loader)[0] == 16
    resize_loader(loader, 48, Patches())
    assert images_per_batch(loader) == [48, 48, 48, 24]


def test_a_loader_of_the_right_size_is_left_alone() -> None:
    loader, patches = models.train_loader(), Patches()
    assert loader.batch_sampler is not None
    resize_loader(loader, models.USERS_SIZE, patches)
    loader.batch_sampler.batch_size = 5  # type: ignore[attr-defined]  # a plain loader's has it
    patches.undo()
    assert delivered_batch_size(loader) == 5


FIXED: dict[str, Callable[[], Any]] = {
    "batch_size=None": lambda: models.train_loader(batch_size=None),
    "list of batches": lambda: DataLoader(TensorDataset(torch.zeros(4, 1)), batch_sampler=[[0, 1], [2, 3]]),
    "tensors": lambda: [torch.zeros(16, 1), torch.zeros(16, 1)],
}


@pytest.mark.parametrize("make", FIXED.values(), ids=FIXED.keys())
def test_data_in_fixed_batches_is_refused(make: Callable[[], Any]) -> None:
    data = make()
    assert delivered_batch_size(data) is None
    with pytest.raises(
        ZeusBSOConfigError, match=rf"\({type(data).__name__}\) does not say how many .* set to 48: give"
    ):
        resize_loader(data, 48, Patches())
