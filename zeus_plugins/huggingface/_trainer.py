"""What the callbacks need to know of the Hugging Face Trainer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from accelerate.utils import gather_object
from transformers import Trainer, TrainerState, TrainingArguments

from zeus_plugins import energy
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOOperationOrderError
from zeus_plugins.training.environment import LOCAL_WORLD_SIZE
from zeus_plugins.training.patches import Patches

T = TypeVar("T")


_logger = logging.getLogger("zeus_plugins")


def not_attached() -> ZeusBSOOperationOrderError:
    return ZeusBSOOperationOrderError(
        "the callback came to this Trainer after its construction: call callback.attach(trainer) before "
        "trainer.train(), or give it to Trainer(callbacks=[…])"
    )


def already_training() -> ZeusBSOOperationOrderError:
    return ZeusBSOOperationOrderError(
        "the callback is in a training already: make a callback for each Trainer that trains at the same time"
    )


def checkpointed(state: TrainerState) -> dict[str, Any]:
    """What the trainer's checkpoints keep for callbacks, by name."""
    return cast("dict[str, Any]", state.stateful_callbacks)  # a list is what the trainer's constructor makes it of


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log metrics beside what the trainer itself logs."""
    # Logging takes back a request to log, which the trainer may still have to follow. A subclass's own `log` is left
    # out: some take their averages of the training from one call to the next.
    control = trainer.control
    should_log = control.should_log
    Trainer.log(trainer, metrics)
    control.should_log = should_log


def trainer_under_construction(args: TrainingArguments) -> Trainer | None:
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and getattr(owner, "args", None) is args:
            return owner
        frame = frame.f_back
    return None


def beforehand(trainer: Trainer, name: str, first: Callable[[], None], patches: Patches) -> None:
    """Do something before a method of the trainer runs, each time."""
    method = getattr(trainer, name)

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    patches.set_attribute(trainer, name, extended)


def afterwards(trainer: Trainer, name: str, then: Callable[[Any], None], patches: Patches) -> None:
    """Do something with what a method of the trainer has returned, each time."""
    method = getattr(trainer, name)

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result)
        return result

    patches.set_attribute(trainer, name, extended)


def node_monitor(args: TrainingArguments, monitor: EnergyMonitor | WindowMonitor | None) -> EnergyMonitor:
    return energy.adapted(monitor) if monitor is not None else energy.auto(device_indices=gpu_indices(args))


def cluster_of(trainer: Trainer, monitor: EnergyMonitor | WindowMonitor | None) -> ClusterMonitor | None:
    """What measures a training on several machines, made by all processes together; None for one machine."""
    args = trainer.args
    if args.world_size <= processes_here(args):
        return None
    measures = args.local_process_index == 0
    return ClusterMonitor(
        (lambda: node_monitor(args, monitor)) if measures else None,
        rank=args.process_index,
        all_gather=all_gathered,
    )


def processes_here(args: TrainingArguments) -> int:
    """Processes of the training on this machine, as its launcher has said; without its word, all of them."""
    return int(LOCAL_WORLD_SIZE.text() or args.world_size)


def gpu_indices(args: TrainingArguments) -> Sequence[int]:
    """The GPUs of this machine that train, as indices into the visible ones; none on another accelerator."""
    if args.device.type != "cuda":
        return ()
    if args.world_size > 1:
        return range(processes_here(args))
    return range(args.n_gpu) if args.n_gpu > 1 else [args.device.index or 0]


def all_gathered(thing: object) -> list[Any]:
    return cast("list[Any]", gather_object([thing]))
