"""Forward and backward passes while a training pauses, and a snapshot that undoes every change the passes make.

Starting from given objects, the snapshot follows attributes, items and closures. State that it cannot reach, such as a
global variable of the script, is not restored. This module takes torch and NumPy from `sys.modules`.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

_logger = logging.getLogger("zeus_plugins")

# Not followed: objects of these packages hold no state that a step changes, or they hold the whole trainer, whose state
# the framework's callback restores.
_FOREIGN = (
    *("lightning", "lightning_fabric", "pytorch_lightning", "transformers", "accelerate", "datasets", "tokenizers"),
    *("logging", "threading", "multiprocessing", "concurrent", "zeus_plugins"),
)
_FOREIGN_PARTS = ("torch.optim", "torch.distributed", "torch.cuda", "torch.utils.tensorboard")
# Attributes that lead from a model to its trainer, and from a loader to its worker processes.
_LEADS_OUT = frozenset({"_trainer", "trainer", "_fabric", "_iterator"})
_ATOMS = (int, float, complex, str, bytes, type(None), type, range, types.ModuleType, types.BuiltinFunctionType)
_ITERATORS = (types.GeneratorType, enumerate, filter, map, reversed, zip)

# A container or array of a data set with more elements than this is taken for samples, which a pass does not change.
_MOST_ELEMENTS = 10_000
# Share of the free memory that the snapshot may take.
_MOST_MEMORY = 0.5


# Layers and losses that combine the samples of a batch, so that a gradient is no mean over samples.
_OVER_THE_BATCH = re.compile(r"BatchNorm|Contrastive|InfoNCE|NTXent|Negatives|GIST|MegaBatch|Barlow|VICReg|ClipLoss")


class CannotProbe(Exception):  # noqa: N818 - an answer rather than an error
    """Raised with the reason, as a clause, why a training cannot be probed without a trace."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes while a training pauses.

    Attributes:
        step: Makes one pass over a batch of the loader, without an optimizer step.
        model: The trained module itself, without a wrapper such as DDP.
        loader: The loader of the training, of torch or made by accelerate.
        batches: Number of batches that a device trains in an epoch.
        state: Further objects that a pass may change.
        data: Data sets and the like that loading may change.
        losses: Further modules that compute losses.
        muted: Returns a context manager that drops the metrics and logs of the passes inside it.
        knows_evaluations: True if the time of evaluations is measured separately from the time of steps.
    """

    step: Callable[[Any], object]
    model: Any
    loader: Any
    batches: float
    state: tuple[Any, ...] = ()
    data: tuple[Any, ...] = ()
    losses: tuple[Any, ...] = ()
    muted: Callable[[], AbstractContextManager[object]] = nullcontext
    knows_evaluations: bool = True

    @property
    def has_workers(self) -> bool:
        """True if worker processes load the data while passes are made."""
        return bool(getattr(self.loader, "num_workers", 0))

    @property
    def mixes_samples(self) -> bool:
        """True if class names, such as BatchNorm, suggest that a batch's gradient is not the mean over its samples."""
        modules = (*self.model.modules(), *self.losses)
        return any(_OVER_THE_BATCH.search(type(each).__name__) for each in modules)


@contextmanager
def untouched(*state: Any, data: tuple[Any, ...] = ()) -> Iterator[None]:
    """Restore these objects and the random number generators at the end of the block.

    Within the block, tensors have no gradients. Large arrays and containers of `data` are samples, and are not copied.

    Raises:
        CannotProbe: A part of the state cannot be restored, or its copy takes too much memory.
    """
    kept = _Snapshot()
    try:
        for each in state:
            kept.keep(each)
        for each in data:
            kept.keep(each, is_data=True)
        kept.keep_random_states()
        yield
    finally:
        kept.restore()


class _Snapshot:
    """Copies of all state that was found, and the functions that restore it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
        self._bytes = 0
        self._torch: Any = sys.modules["torch"]
        self._numpy: Any = sys.modules.get("numpy")
        try:
            self._free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            self._free_bytes = sys.maxsize

    def restore(self) -> None:
        """Restore everything, in reverse order."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:
                _logger.exception("the probe could not restore a part of the training: set probe='off' and train again")

    def keep_random_states(self) -> None:
        """Copy the states of the global random number generators."""
        torch, numpy = self._torch, self._numpy
        self._undo.append(partial(random.setstate, random.getstate()))
        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if numpy is not None:
            self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def keep(self, root: Any, *, is_data: bool = False) -> None:
        """Copy all state that can be reached from an object."""
        waiting = [root]
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, _ATOMS) or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            waiting += self._kept(thing, is_data=is_data)

    def _kept(self, thing: Any, *, is_data: bool) -> list[Any]:
        """Copy the state of one object, and return the objects that it refers to."""
        torch, numpy = self._torch, self._numpy
        if hasattr(thing, "_torchdynamo_orig_callable"):
            raise CannotProbe("a compiled model is compiled again for other sizes")
        if isinstance(thing, torch.Tensor):
            self._keep_tensor(thing, is_data=is_data)
        elif isinstance(thing, torch.Generator):
            self._undo.append(partial(thing.set_state, thing.get_state()))
        elif isinstance(thing, random.Random):
            self._undo.append(partial(thing.setstate, thing.getstate()))
        elif numpy is not None and isinstance(thing, (numpy.ndarray, numpy.random.RandomState, numpy.random.Generator)):
            self._keep_of_numpy(thing, is_data=is_data)
        elif isinstance(thing, (dict, list, set, deque)):
            return self._keep_items(thing, is_data=is_data)
        elif isinstance(thing, (tuple, frozenset)):
            return [] if is_data and len(thing) > _MOST_ELEMENTS else list(thing)
        elif isinstance(thing, partial):
            return [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            return [thing.__self__]
        elif isinstance(thing, types.FunctionType):
            return [] if _is_foreign(thing.__module__) else self._keep_closure(thing)
        elif isinstance(thing, _ITERATORS) or (hasattr(thing, "__next__") and not hasattr(thing, "__dict__")):
            raise CannotProbe(f"its state includes a {type(thing).__name__}, which cannot be rewound")
        elif isinstance(thing, torch.nn.Module) or not _is_foreign(type(thing).__module__):
            return self._keep_attributes(thing, is_data=is_data)
        return []

    def _keep_tensor(self, tensor: Any, *, is_data: bool) -> None:
        torch = self._torch
        if is_data and tensor.numel() > _MOST_ELEMENTS:
            return
        if torch.nn.parameter.is_lazy(tensor):
            raise CannotProbe("a lazy module takes its shape from its first batch")
        if hasattr(tensor, "_local_tensor"):
            raise CannotProbe("its parameters are sharded")
        self._bytes += tensor.nbytes
        if self._bytes > _MOST_MEMORY * self._free_bytes:
            raise CannotProbe("a copy of its state takes too much memory")
        before, gradient = tensor.detach().to("cpu", copy=True), tensor.grad if tensor.is_leaf else None

        def restore() -> None:
            with torch.inference_mode(tensor.is_inference()):
                tensor.data.copy_(before)
            if tensor.is_leaf:
                tensor.grad = gradient

        self._undo.append(restore)
        if gradient is not None:
            tensor.grad = None

    def _keep_of_numpy(self, thing: Any, *, is_data: bool) -> None:
        numpy = self._numpy
        if isinstance(thing, numpy.random.RandomState):
            self._undo.append(partial(thing.set_state, thing.get_state()))
        elif isinstance(thing, numpy.random.Generator):
            self._undo.append(partial(setattr, thing.bit_generator, "state", thing.bit_generator.state))
        elif thing.flags.writeable and not (is_data and thing.size > _MOST_ELEMENTS):
            self._undo.append(partial(numpy.copyto, thing, thing.copy()))

    def _keep_items(self, box: Any, *, is_data: bool) -> list[Any]:
        if is_data and len(box) > _MOST_ELEMENTS:
            return []
        is_dict = isinstance(box, dict)
        before = list(box.items()) if is_dict else list(box)

        def restore() -> None:
            now = list(box.items()) if is_dict else list(box)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                return
            box.clear()
            (box.extend if isinstance(box, (list, deque)) else box.update)(before)

        self._undo.append(restore)
        if is_dict:
            return [each for name, each in before if name not in _LEADS_OUT]
        return before

    def _keep_attributes(self, thing: Any, *, is_data: bool) -> list[Any]:
        found = self._keep_items(vars(thing), is_data=is_data) if hasattr(thing, "__dict__") else []
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                    found.append(getattr(thing, name))
                    self._undo.append(partial(object.__setattr__, thing, name, found[-1]))
        return found

    def _keep_closure(self, function: types.FunctionType) -> list[Any]:
        found = []
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # The cell has no value yet.
                continue
            self._undo.append(partial(setattr, cell, "cell_contents", found[-1]))
        return found


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two elements, or the names and values of two items, are the same objects."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _is_foreign(module: str | None) -> bool:
    module = module or ""
    return module.partition(".")[0] in _FOREIGN or module.startswith(_FOREIGN_PARTS)
