"""The batches of a training: the split of a global size over devices, the size of loaders, and counts of real batches.

A loader may ignore the batch size that was set: its sampler may have made the batches before, its data set may have
read the size once, or a module may accumulate by hand. Therefore this module counts the samples in the first batches of
each epoch (in all batches, if they differ in size) and the batches of the first optimizer steps. The declared length of
a loader must change with its batch size, because trainers end an epoch by this length. The collate function must use
all items of a batch.

Loaders are changed in place, because remaking them fails for subclasses and positional arguments. This module does not
import torch: a loader is any object with a `batch_sampler` or a `batch_size`.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.patches import Patches

TOLERANCE = 0.1
"""Largest relative deviation of the mean size of uneven batches from the size that was set."""

# Number of an epoch's batches that must have the same size before the later batches are assumed to have this size.
_FIRST = 4
LONE_SAMPLE = "zeus: the last batch of an epoch, a single sample, is left out: the model has a batch normalisation"

# Packages whose samplers deliver batches of one size, except for the last.
_EVEN_SAMPLERS = ("torch.", "accelerate.")


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Split of an optimizer step: samples per batch on a device, and batches whose gradients a device accumulates."""

    per_device: int
    accumulation: int


def split_batch(
    global_batch_size: int, *, world_size: int, accumulation: int = 1, max_per_device: int | None = None
) -> BatchSplit | None:
    """Split a global batch size: ``global = per_device · world_size · accumulation``.

    Return the split with the fewest accumulated batches: at least `accumulation` (the user's setting), and more if
    `max_per_device` requires it. Return None if the size cannot be split evenly in this way.
    """
    per_device_step, remainder = divmod(global_batch_size, world_size)
    if remainder:
        return None
    most = accumulation if max_per_device is None else per_device_step
    for steps in range(accumulation, most + 1):
        per_device, remainder = divmod(per_device_step, steps)
        if remainder == 0 and (max_per_device is None or per_device <= max_per_device):
            return BatchSplit(per_device, steps)
    return None


def scaled_together(sizes: Sequence[int], largest: int) -> list[int]:
    """Scale `sizes` so that the largest becomes `largest`; raise `ZeusBSOConfigError` if one is no whole number."""
    before = max(sizes)
    if any(size * largest % before for size in sizes):
        raise ZeusBSOConfigError(
            f"the train loaders mix {':'.join(map(str, sizes))} samples, which cannot become {largest} in the same "
            f"proportion: choose batch sizes that are multiples of {before // math.gcd(*sizes)} for each device",
            of_size=True,
        )
    return [size * largest // before for size in sizes]


def resize_loader(
    loader: Any, batch_size: int, patches: Patches, *, processes: int = 1, needs_size: bool = True
) -> None:
    """Make a loader deliver another batch size to this process from its next iteration on.

    Accelerate nests samplers, each of which keeps a batch size. If accelerate splits each batch over the processes,
    this kept size is the sum over all `processes` that get different data. Raise `ZeusBSOConfigError` for a loader
    without a batch size, except for a loader with a batch sampler if `needs_size` is False.
    """
    batchers = _batchers(loader)
    samplers = nested_samplers(getattr(unwrapped(loader), "batch_sampler", None))
    if not batchers and (needs_size or not samplers):
        raise ZeusBSOConfigError(
            f"the training data ({type(loader).__name__}) does not say how many samples it puts into a batch, so its "
            f"batch size cannot be set to {batch_size}: give a torch DataLoader with batch_size= or with a batch "
            "sampler that has a batch_size"
        )
    # The user's own sampler is the innermost one.
    inner = samplers[-1] if samplers else loader
    before, old_size = _declared_samples(inner), getattr(inner, "batch_size", 0)
    for batcher, is_shared in batchers:
        size = batch_size * processes if is_shared else batch_size
        if batcher.batch_size != size:
            patches.set_attribute(batcher, "batch_size", size)
    if before is not None and old_size != inner.batch_size:
        _check_length(inner, before, old_size, inner.batch_size)


def leave_out_lone_sample(loader: Any, model: Any, patches: Patches) -> bool:
    """Leave out the last batch of an epoch if it has one sample, which a batch normalisation cannot train.

    Return True if there is such a batch and the model has a batch normalisation.
    """
    batcher: Any = getattr(loader, "batch_sampler", None)
    torch: Any = sys.modules["torch"]
    if type(batcher) is not torch.utils.data.BatchSampler or batcher.drop_last:
        return False
    try:
        samples = len(batcher.sampler)
    except TypeError:  # an endless sampler
        return False
    has_batch_norm = any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules())
    if not has_batch_norm or samples < batcher.batch_size or samples % batcher.batch_size != 1:
        return False
    patches.set_attribute(batcher, "drop_last", True)
    return True


def check_resizable(loader: Any) -> None:
    """Raise `ZeusBSOConfigError` if the declared length of a loader would not change with its batch size.

    The loader keeps its batch size.
    """
    size = delivered_batch_size(loader)
    if size is None:
        return
    patches = Patches()
    try:
        resize_loader(loader, 2 * size, patches)
    finally:
        patches.undo()


def _declared_samples(batcher: Any) -> int | None:
    """Return the samples of an epoch: declared length × batch size of a batch sampler or loader; None if unknown."""
    size = getattr(batcher, "batch_size", None)
    try:
        return len(batcher) * size if isinstance(size, int) else None
    except (TypeError, NotImplementedError):
        return None


def _check_length(batcher: Any, before: int | None, old_size: int, new_size: int) -> None:
    """Raise `ZeusBSOConfigError` if an epoch no longer declares about `before` samples, its number at `old_size`."""
    after = _declared_samples(batcher)
    if before is None or after is None:
        return
    # Each data set may end with an incomplete batch. Batches of different sizes change the declared number a little.
    parts = max(1, len(getattr(batcher, "batch_samplers", ())))
    is_even = type(batcher).__module__.startswith(_EVEN_SAMPLERS)
    if abs(after - before) < max(old_size, new_size) * parts + (0 if is_even else TOLERANCE * before):
        return
    name = type(batcher).__name__
    raise ZeusBSOConfigError(
        f"the length of the training data does not follow the batch size: by {name}.__len__, an epoch has {before} "
        f"samples at batch size {old_size} and {after} at {new_size}, so trainers would end it at the wrong place. Let "
        "__len__ compute the number of batches from the present batch_size",
        of_size=True,
    )


def delivered_batch_size(loader: Any) -> int | None:
    """Return the batch size that this loader declares, or None."""
    for batcher in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(batcher, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def process_batch_sizes(loader: Any, processes: int) -> set[float]:
    """Return the batch sizes per process that the parts of a loader declare: a single size if all parts agree."""
    return {batcher.batch_size / (processes if is_shared else 1) for batcher, is_shared in _batchers(loader)}


def unwrapped(loader: Any) -> Any:
    """Return the loader that accelerate has wrapped, or the loader itself if it is not wrapped."""
    return getattr(loader, "base_dataloader", loader)


def _batchers(loader: Any) -> list[tuple[Any, bool]]:
    """Return the parts of a loader that keep a batch size, each with True if it is a sum over all processes."""
    inner = unwrapped(loader)
    is_shared = getattr(loader, "split_batches", False)
    found: list[tuple[Any, bool]] = [(inner, is_shared)]
    batcher = getattr(inner, "batch_sampler", None)
    if batcher is None:
        batcher = getattr(inner, "sampler", None)
    for each in nested_samplers(batcher):
        is_shared = is_shared or getattr(each, "split_batches", False)
        found.append((each, is_shared))
    dataset: Any = getattr(inner, "dataset", None)
    if hasattr(dataset, "split_batches"):  # accelerate's share of a stream
        found.append((dataset, dataset.split_batches))
    return [(each, is_shared) for each, is_shared in found if isinstance(getattr(each, "batch_size", None), int)]


class SampleCount:
    """Counts the samples in the batches of one loader.

    Each batch except the last of an epoch should have `expected` samples; `remedy` is the advice in the error. Batches
    of different sizes are compared by their mean. If an epoch has too few of them for a mean, the counts of all epochs
    are pooled, and at the script's own size (`is_own`) the check waits until they are enough.
    """

    def __init__(self, expected: int, remedy: str, *, is_own: bool = False) -> None:
        self._expected = expected
        self._remedy = remedy
        self._is_own = is_own
        self._is_over = False
        self._earlier: list[int] = []  # batches of earlier epochs with few batches, without the last of each
        self._name = ""
        self._lone_only = False
        self._settles = True
        self._parts = 1
        self._sizes: list[int] = []

    def watch(self, loader: Any, patches: Patches) -> None:
        """Count from the loader's next iteration on.

        If the loader has a batch sampler, count the indices of each batch. Otherwise count the samples in the batches.
        In an epoch of a stream that a torch DataLoader batches, only a single batch is checked, because the tensors of
        such batches may have any shape. The loader's collate function is checked at its first batch.
        """
        inner = unwrapped(loader)
        sampler = getattr(inner, "batch_sampler", None)
        collate: Any = getattr(inner, "collate_fn", None)
        if sampler is not None and collate is not None and not str(collate.__module__).startswith("torch."):
            patches.set_attribute(inner, "collate_fn", CheckedCollate(collate))
        self._name = type(inner).__name__
        data_set_kinds = type(getattr(inner, "dataset", None)).__mro__
        if sampler is None or any(kind.__name__ == "IterableDataset" for kind in data_set_kinds):
            self._lone_only = sampler is not None
            _extend_iteration(inner, lambda batches: self._counted(batches, samples_in), patches)
        else:
            self._name = f"{self._name} with {type(sampler).__name__}"
            samplers = nested_samplers(sampler)
            self._remedy = _remedy_of(samplers[-1]) or self._remedy
            self._settles = all(type(each).__module__.startswith(_EVEN_SAMPLERS) for each in samplers)
            self._parts = len(getattr(samplers[-1], "batch_samplers", ()))
            _extend_iteration(sampler, lambda batches: self._counted(batches, len), patches)

    def check(self) -> None:
        """Raise `ZeusBSOConfigError` if the epoch's batches so far do not have the expected size.

        If the batches differ in size, the mean size may deviate from the expected size by `TOLERANCE`.
        """
        sizes = self._sizes
        if 0 < len(sizes) < _FIRST:
            self._check_few()
            self._check_pooled()
        if len(sizes) < _FIRST or self._lone_only or set(sizes[:-1]) == {self._expected}:
            return
        # A sampler over several data sets delivers a smaller last batch for each data set: leave out these batches.
        full = sorted(sizes)[self._parts :] if self._parts > 1 else sizes
        mean = sum(full) / len(full)
        if abs(mean - self._expected) > TOLERANCE * self._expected:
            raise self._error(f"{mean:.4g} samples on average over {len(sizes)} batches of different sizes")

    def end(self) -> None:
        """Count and check nothing in later epochs."""
        self._is_over = True

    def _counted(self, batches: Iterator[Any], size_of: Callable[[Any], int | None]) -> Iterator[Any]:
        if self._is_over:
            return
        if len(self._sizes) < _FIRST:
            self._earlier += self._sizes[:-1] or self._sizes
        sizes: list[int] = []
        self._sizes = sizes
        for batch in batches:
            size = size_of(batch)
            if size is None:  # the size of these batches is unknown
                yield batch
                return
            # Another batch follows, so none of the counted batches is the epoch's last batch, which may be smaller.
            if len(sizes) == _FIRST and not self._lone_only and len(set(sizes)) == 1 and sizes[0] != self._expected:
                raise self._error(f"{sizes[0]} samples in each batch")
            sizes.append(size)
            yield batch
            if len(sizes) > _FIRST and (self._lone_only or (self._settles and set(sizes) == {self._expected})):
                return
        if not self._sizes:
            raise self._error("no batch at all")
        self._check_few()

    def _check_few(self) -> None:
        """Check an epoch that has delivered at least one batch, but too few batches for a mean."""
        sizes, expected = self._sizes, self._expected
        if len(sizes) == 1 and sizes[0] < expected:
            raise ZeusBSOConfigError(
                f"the train loader ({self._name}) delivered a single batch of {sizes[0]} samples in place of "
                f"{expected}: the data set is smaller than the batch; give JobSpec(batch_sizes=…) only sizes that it "
                "can fill",
                of_size=True,
            )
        is_even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        if is_even and self._settles and not self._lone_only and sizes[0] != expected:
            raise self._error(f"{sizes[0]} samples in each batch")

    def _check_pooled(self) -> None:
        """Check the mean of few batches of a sampler whose batches may differ in size."""
        counted = self._earlier + (self._sizes[:-1] or self._sizes)
        if self._settles or self._lone_only or (self._is_own and len(counted) < _FIRST):
            return
        mean = sum(counted) / len(counted)
        if abs(mean - self._expected) > TOLERANCE * self._expected:
            raise self._error(f"{mean:.4g} samples on average in the batches that could be counted")

    def _error(self, delivered: str) -> ZeusBSOConfigError:
        return ZeusBSOConfigError(
            f"the train loader ({self._name}) delivered {delivered}, in place of {self._expected}, though its batch "
            f"size was set: {self._remedy}",
            of_size=True,
        )


def _remedy_of(sampler: Any) -> str | None:
    """Return the advice for a batch sampler that cannot follow a batch size by its `batch_size`; None for others."""
    if any("NoDuplicates" in kind.__name__ for kind in type(sampler).__mro__):
        return "the sampler puts no text twice into a batch, and the data cannot fill such batches: use smaller sizes"
    for name, inner in getattr(sampler, "__dict__", {}).items():
        if isinstance(getattr(inner, "batch_size", None), int) and hasattr(inner, "__iter__"):
            return f"call the sampler's attribute {name!r} batch_sampler, so that the size of its batches is set, too"
    return None


class CheckedCollate:
    """A collate function that raises `ZeusBSOConfigError` if it makes no more data of two items than of one item.

    In this case each item is a batch already: only the first item of a batch would be trained, and the cost would seem
    to fall as the batch size rises. Each process that loads data makes the check at its first call. The check collates
    copies of an item, and restores the states of random numbers.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        """Return the batch of these items."""
        # Later calls of this object go directly to the collate function, so that the check costs nothing then.
        self.__class__ = type("CheckedCollate", (CheckedCollate,), {"__call__": staticmethod(self._collate)})
        self._check(items)
        return self._collate(items)

    def __getattr__(self, name: str) -> Any:
        if name == "_collate":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self._collate, name)

    def _check(self, items: Any) -> None:
        try:
            with _random_states_kept():
                one, two = (
                    _elements(self._collate([copy.deepcopy(items[0]) for _ in range(number)])) for number in (1, 2)
                )
        except Exception:  # the function may need different items, or more items; the training shows its own errors
            return
        if not one or two is None or two > one:
            return
        raise ZeusBSOConfigError(
            "the items of the training data are batches already: the loader's collate_fn makes of two items no more "
            "than of one, so that a larger batch size would train on a part of the data. Give a data set of single "
            "samples, or let collate_fn join all items, such as by torch.cat"
        )


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the states of the global random number generators at the end of the block."""
    torch: Any = sys.modules["torch"]
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):  # not those of GPUs, which a worker process must not touch
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _elements(batch: Any) -> int | None:
    """Count the numbers and texts in a batch; return None if the batch contains anything else."""
    count = 0
    for leaf in _leaves(batch):
        if hasattr(leaf, "shape"):
            count += int(math.prod(leaf.shape))
        elif isinstance(leaf, str | bytes | int | float):
            count += 1
        elif leaf is not None:
            return None
    return count


class StepCount:
    """Counts the batches between optimizer steps until this number equals the `accumulation` that was set.

    It counts the steps of each torch optimizer, and those of all optimizers together; other optimizers are ignored.
    """

    def __init__(self, optimizers: Sequence[Any], accumulation: int) -> None:
        self._accumulation = accumulation
        self._batches = 0
        self._gaps: dict[int | None, list[int]] = {None: []}  # by optimizer; None: steps of all together
        self._latest: dict[int | None, int] = {}
        self._handles = []
        for number, optimizer in enumerate(optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
            if hasattr(inner, "register_step_post_hook"):
                self._gaps[number] = []
                self._handles.append(inner.register_step_post_hook(self._hook(number)))

    @property
    def is_counting(self) -> bool:
        """True until a gap between two steps has matched the accumulation, or counting was stopped."""
        return bool(self._handles)

    def batch_trained(self) -> None:
        """Note that a batch was trained; call it after the optimizer step of the batch, if it has one."""
        self._batches += 1
        if self.is_counting and any(self._accumulation in gaps for gaps in self._gaps.values()):
            self.close()

    def check(self) -> None:
        """Raise `ZeusBSOConfigError` if no gap between two steps so far equals the accumulation that was set."""
        between = [gap for gap in self._gaps[None] if gap > 0]
        # One gap is not enough: the first gap may be longer, as mixed precision skips steps until its scale is found.
        if not self.is_counting or len(between) < 2 or self._accumulation in between:
            return
        seen = ", ".join(map(str, sorted(set(between))))
        raise ZeusBSOConfigError(
            f"an optimizer step followed after each {seen} batches in place of {self._accumulation}, so that it did "
            "not train with the batch size that would be reported: leave the accumulation of gradients to the trainer, "
            "and give each epoch at least as many batches as a step accumulates",
            of_size=True,
        )

    def close(self) -> None:
        """Stop counting."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, number: int) -> Callable[..., None]:
        def stepped(*_: Any) -> None:
            for key in (number, None):
                self._gaps[key].append(self._batches - self._latest.get(key, -1))
                self._latest[key] = self._batches

        return stepped


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch: the common first dimension of its tensors or arrays, or None.

    The tensors or arrays may be nested in mappings, lists and tuples.
    """
    lengths = {leaf.shape[0] for leaf in _leaves(batch) if getattr(leaf, "shape", ())}
    return lengths.pop() if len(lengths) == 1 else None


def _leaves(part: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and other values in nested mappings, lists and tuples."""
    if hasattr(part, "shape") or not isinstance(part, Mapping | list | tuple):
        yield part
        return
    for each in part.values() if isinstance(part, Mapping) else part:
        yield from _leaves(each)


def _extend_iteration(iterable: Any, extend: Callable[[Iterator[Any]], Iterator[Any]], patches: Patches) -> None:
    """Pass each iteration over an object through `extend` until `extend` returns.

    The object gets a subclass of its class, so that `isinstance` still holds.
    """
    kind: Any = type(iterable)
    if not hasattr(kind, "__iter__"):  # iterated by __getitem__
        return
    try:

        class Counted(kind):  # type: ignore[misc]  # the class is known only at run time
            __slots__ = ()

            def __iter__(self) -> Iterator[Any]:
                batches = iter(super().__iter__())
                # Batches after the counted batches come directly from the iterator, without extra Python code.
                return chain(extend(batches), batches)

        Counted.__name__, Counted.__qualname__, Counted.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        patches.set_attribute(iterable, "__class__", Counted)
    except TypeError:  # built-in types cannot be changed
        raise ZeusBSOConfigError(
            f"the training data come in a fixed {kind.__name__} of batches, so that their size cannot be chosen: give "
            "a torch DataLoader with batch_size= or with a batch sampler"
        ) from None


def nested_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers nested in it (accelerate nests them), innermost last; [] for None."""
    found = []
    while sampler is not None:
        found.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None)
    return found
