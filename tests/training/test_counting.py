"""Samples of batches and batches of steps, counted in iterations of real loaders and steps of real optimizers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset
from transformers import DataCollatorForSeq2Seq

from tests.support import lightning_bench as models
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.batches import (
    CheckedCollate,
    SampleCount,
    StepCount,
    delivered_batch_size,
    resize_loader,
    samples_in,
    split_batch,
)
from zeus_plugins.training.patches import Patches


def data(samples: int) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, 3))


class Dealing(Sampler[list[int]]):
    """A sampler of batches with these sizes, independent of its `batch_size`."""

    def __init__(self, *sizes: int) -> None:
        self.batch_size = 16
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        for size in self._sizes:
            yield list(range(size))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.zeros(self._samples, 3)


def first_of(items: list[Any]) -> Any:
    return items[0]


def joined(items: list[Any]) -> torch.Tensor:
    return torch.cat([one for (one,) in items])


def in_one_row(items: list[Any]) -> dict[str, Any]:
    """Return sequences without padding, like transformers' DataCollatorWithFlattening."""
    return {"input_ids": torch.cat([one for (one,) in items])[None], "lengths": [len(one) for (one,) in items]}


def noisy(items: list[Any]) -> torch.Tensor:
    random.random()  # noqa: S311 - no secret
    numpy.random.random()
    return torch.stack([one for (one,) in items]) + torch.rand(1)


def only_pairs(items: list[Any]) -> torch.Tensor:
    assert len(items) > 1
    return torch.stack([items[0][0], items[1][0]])


class Batches:
    """Batches without a torch loader."""

    batch_size = 16

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for size in self._sizes:
            yield {"x": torch.zeros(size, 3), "y": torch.zeros(size)}


def dealt(*sizes: int) -> DataLoader[Any]:
    return DataLoader(data(100), batch_sampler=Dealing(*sizes))


class DealingParts(Dealing):
    """A sampler of two data sets in sequence, like the samplers of sentence-transformers."""

    batch_samplers = (SequentialSampler(range(1)),) * 2


def shard_of_parts() -> DataLoader[Any]:
    """Return every other batch, as the first of two processes receives, with the last batches of both data sets."""
    sampler: Any = DealingParts(*[16] * 6, 8, *[16] * 5, 4, 16)
    shard: Any = BatchSamplerShard(sampler, num_processes=2, process_index=0, even_batches=False)
    return DataLoader(data(100), batch_sampler=shard)


def prepared(samples: int, batch_size: int = 16) -> Any:
    return Accelerator(cpu=True).prepare_data_loader(DataLoader(data(samples), batch_size=batch_size))


RIGHT: dict[str, Callable[[], Any]] = {
    "one size": lambda: DataLoader(data(160), batch_size=16),
    "a smaller last batch": lambda: DataLoader(data(40), batch_size=16),
    "a single full batch": lambda: DataLoader(data(16), batch_size=16),
    "workers": lambda: DataLoader(data(90), batch_size=16, num_workers=1),
    "accelerate's": lambda: prepared(40),
    "16 on average": lambda: dealt(14, 18, 20, 12, 16, 17, 15),
    "almost 16 on average": lambda: dealt(14, 18, 19, 16, 18, 18, 18),
    "several data sets, dealt out to processes": shard_of_parts,
    "a stream": lambda: DataLoader(Stream(40), batch_size=16),
    "a stream of sequences first": lambda: DataLoader(Stream(40), 16, collate_fn=lambda x: torch.zeros(3, len(x))),
    "no torch loader": lambda: Batches(16, 16, 16, 16, 16, 3),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT.keys())
def test_batches_of_the_set_size_pass(make: Callable[[], Any]) -> None:
    loader, patches = make(), Patches()
    kind = type(loader)
    before = [samples_in(batch) for batch in loader]
    count = SampleCount(16, "make it follow")
    count.watch(loader, patches)
    for _ in range(2):
        assert [samples_in(batch) for batch in loader] == before
        count.check()
    assert isinstance(loader, kind)
    patches.undo()
    assert type(loader) is kind


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "batches made before": (lambda: dealt(*[8] * 20), r"\(DataLoader with Dealing\) delivered 8 samples in each"),
    "a short epoch": (lambda: DataLoader(data(20), batch_size=8), "delivered 8 samples in each batch, in place of 16"),
    "too large": (lambda: DataLoader(data(200), batch_size=32), "delivered 32 samples in each batch, in place of 16"),
    "accelerate's": (lambda: prepared(200, 32), "delivered 32 samples in each batch"),
    "little data": (lambda: DataLoader(data(9), batch_size=16), "batch of 9 samples in place of 16: the data set"),
    "little of a stream": (lambda: DataLoader(Stream(9), batch_size=16), "a single batch of 9 samples in place of 16"),
    "all dropped": (lambda: DataLoader(data(9), batch_size=16, drop_last=True), "delivered no batch at all"),
    "no torch loader": (lambda: Batches(*[8] * 20), r"\(Batches\) delivered 8 samples in each batch"),
    "other on average": (
        lambda: dealt(14, 20, 20, 19, 18, 18, 18),
        "18.14 samples on average over 7 batches of different sizes, in place of 16, .*: make it follow",
    ),
}


@pytest.mark.parametrize(("make", "problem"), WRONG.values(), ids=WRONG.keys())
def test_batches_of_a_wrong_size_are_an_error_naming_the_loader(make: Callable[[], Any], problem: str) -> None:
    loader = make()
    count = SampleCount(16, "make it follow")
    count.watch(loader, Patches())

    def train() -> None:
        for number, _ in enumerate(loader):
            assert number < 10
        count.check()

    with pytest.raises(ZeusBSOConfigError, match=problem):
        train()


class NoDuplicatesBatchSampler(Dealing):
    """A sampler of this name, as sentence-transformers has one."""


class Wrapping(Dealing):
    """A batch sampler over another one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.inner = BatchSampler(range(64), 16, drop_last=False)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (NoDuplicatesBatchSampler, "the data cannot fill such batches: use smaller sizes"),
        (Wrapping, "call the sampler's attribute 'inner' batch_sampler"),
        (Dealing, "the remedy of the framework"),
    ],
)
def test_remedy_fits_the_sampler(kind: type[Dealing], remedy: str) -> None:
    loader = DataLoader(data(64), batch_sampler=kind(8, 8, 8, 8, 8, 8))
    count = SampleCount(16, "the remedy of the framework")
    count.watch(loader, Patches())
    with pytest.raises(ZeusBSOConfigError, match=remedy):
        list(loader)


def collated(collate: Callable[[Any], Any], batch_size: int = 2, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(data(8), batch_size=batch_size, collate_fn=collate, num_workers=workers)


# Python 3.12 and newer warn of forking with threads; torch has threads, but its workers do not use them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_items_with_several_samples_are_refused_even_at_batch_size_1(batch_size: int, workers: int) -> None:
    loader = collated(first_of, batch_size, workers)
    SampleCount(batch_size, "").watch(loader, Patches())
    with pytest.raises(ZeusBSOConfigError, match="the items of the training data are batches already"):
        next(iter(loader))


@pytest.mark.parametrize("collate", [joined, in_one_row, noisy, only_pairs, lambda items: items])
def test_collate_function_using_all_items_is_left_unchanged(collate: Callable[[Any], Any]) -> None:
    loader, patches = collated(collate), Patches()
    SampleCount(2, "").watch(loader, patches)
    assert len(list(loader)) == 4
    patches.undo()
    assert loader.collate_fn is collate


def test_check_of_a_collate_function_preserves_the_random_state() -> None:
    def batches(*, checked: bool) -> list[torch.Tensor]:
        loader = collated(noisy)
        if checked:
            SampleCount(2, "").watch(loader, Patches())
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return [*loader, torch.tensor([random.random(), numpy.random.random()])]  # noqa: S311 - no secret

    assert all(map(torch.equal, batches(checked=True), batches(checked=False)))


def test_checked_collate_function_can_be_copied_to_workers_with_attributes() -> None:
    checked = copy.deepcopy(CheckedCollate(DataCollatorForSeq2Seq(None, label_pad_token_id=7)))  # as pickle does
    assert checked.label_pad_token_id == 7


def test_four_batches_of_equal_size_suffice_to_decide() -> None:
    loader = dealt(*[8] * 20)
    SampleCount(16, "make it follow").watch(loader, Patches())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    with pytest.raises(ZeusBSOConfigError, match="8 samples in each batch"):
        next(batches)


def test_interrupted_epoch_is_compared_up_to_the_interruption() -> None:
    loader, count = dealt(8, 9, 8, 9, 8, 9, 8), SampleCount(16, "make it follow")
    count.watch(loader, Patches())
    for _, _ in zip(range(5), loader, strict=False):
        pass
    with pytest.raises(ZeusBSOConfigError, match=r"8\.4 samples on average over 5 batches"):
        count.check()


def test_batches_without_a_common_length_are_not_judged() -> None:
    class Pairs(Batches):
        def __iter__(self) -> Iterator[Any]:
            yield torch.zeros(5, 2), torch.zeros(7)
            yield torch.zeros(5, 2), torch.zeros(7)

    loader, count = Pairs(), SampleCount(16, "make it follow")
    count.watch(loader, Patches())
    assert len(list(loader)) == 2
    count.check()


def test_fixed_list_of_batches_is_refused() -> None:
    loader = DataLoader(data(4), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ZeusBSOConfigError, match="a fixed list of batches, so that their size cannot be chosen"):
        SampleCount(2, "make it follow").watch(loader, Patches())


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(5, 2), torch.zeros(5)), 5),
        ({"x": torch.zeros(5, 2), "y": [torch.zeros(5)], "name": "five", "weight": torch.tensor(0.5)}, 5),
        ((torch.zeros(5), torch.zeros(6)), None),
        ("five", None),
        ([1, 2, 3], None),
    ],
)
def test_samples_in_a_batch_are_counted_by_type(batch: Any, samples: int | None) -> None:
    assert samples_in(batch) == samples


def test_watched_sampler_keeps_the_class() -> None:
    sampler, patches = BatchSampler(SequentialSampler(data(40)), 16, drop_last=False), Patches()
    SampleCount(16, "").watch(DataLoader(data(40), batch_sampler=sampler), patches)
    assert isinstance(sampler, BatchSampler)
    assert (len(sampler), sampler.batch_size) == (3, 16)
    patches.undo()
    assert type(sampler) is BatchSampler


def optimizers(number: int) -> list[SGD]:
    return [SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(number)]


def trained(steps: str, accumulation: int) -> StepCount:
    """Count steps over batches; an ``x`` means that a step follows the batch."""
    (optimizer,) = optimizers(1)
    count = StepCount([optimizer], accumulation)
    for step in steps:
        if step == "x":
            optimizer.step()
        count.batch_trained()
    return count


@pytest.mark.parametrize(
    ("steps", "accumulation", "counting"),
    [
        ("xx", 1, False),
        ("x", 1, False),
        ("---", 1, True),
        ("---xx", 1, False),  # mixed precision skips the first steps
        ("-x-x", 2, False),
        ("-x-xx", 2, False),
        ("---x", 1, True),
        ("---xx", 4, False),  # the second step belongs to the remainder at the end of an epoch
    ],
)
def test_expected_steps_end_the_counting_early(steps: str, accumulation: int, counting: bool) -> None:
    count = trained(steps, accumulation)
    count.check()
    assert count.is_counting is counting
    count.close()
    assert not count.is_counting


@pytest.mark.parametrize(
    ("steps", "accumulation", "problem"),
    [("---x---x", 1, "after each 4 batches in place of 1"), ("x-xx-xx", 4, "after each 1, 2 batches in place of 4")],
)
def test_unexpected_steps_are_an_error(steps: str, accumulation: int, problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        trained(steps, accumulation).check()


@pytest.mark.parametrize(
    "steps", [[[1], [1], [1], [1], [0, 1], [1]], [[0], [1], [0], [1]]], ids=["one more often", "by turns"]
)
def test_two_optimizers_may_step_after_the_same_batch(steps: list[list[int]]) -> None:
    both = optimizers(2)
    count = StepCount(both, 1)
    for numbers in steps:
        for number in numbers:
            both[number].step()
        count.batch_trained()
    count.check()
    assert not count.is_counting


def test_foreign_optimizer_is_not_counted() -> None:
    count = StepCount([object()], 1)
    assert not count.is_counting
    count.check()


# --- Sizes of loaders -------------------------------------------------------------------------------------------------


sizes = st.integers(1, 10_000)


@given(global_batch_size=sizes, world_size=st.integers(1, 8), accumulation=st.integers(1, 8), limit=st.none() | sizes)
def test_split_adds_up_and_accumulates_as_little_as_possible(
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
def test_loader_delivers_the_set_size_until_undone(make: Callable[[], DataLoader[Any]]) -> None:
    loader, patches = make(), Patches()
    resize_loader(loader, 48, patches)
    assert delivered_batch_size(loader) == 48
    assert loader.batch_size in (48, None)
    assert images_per_batch(loader) == [48, 48, 48, 24]
    patches.undo()
    assert delivered_batch_size(loader) == 16
    assert images_per_batch(loader) == [16] * 10 + [8]


def test_loader_of_the_right_size_is_left_unchanged() -> None:
    loader, patches = models.train_loader(), Patches()
    assert loader.batch_sampler is not None
    resize_loader(loader, models.USERS_SIZE, patches)
    loader.batch_sampler.batch_size = 5  # type: ignore[attr-defined]  # a plain loader's sampler has the attribute
    patches.undo()
    assert delivered_batch_size(loader) == 5
