"""The passes of a Hugging Face training for a probe: a part of `_trainer`, which alone imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zeus_plugins.training.probe import Passes
from zeus_plugins.training.untouched import CannotProbe

# Attributes of a trainer whose large parts are samples.
_DATA = ("train_dataset", "eval_dataset", "data_collator")


def passes_of(trainer: Any, *, shares_data: bool) -> Passes:
    """Return the passes of a trainer between two steps; raise `CannotProbe` if it has none.

    If the trainer `shares_data`, several processes or GPUs work on the same batch.
    """
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model
    loader = trainer.callback_handler.train_dataloader
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or args.n_gpu > 1 or shares_data:
        raise CannotProbe("several processes or GPUs share the model or a batch")
    if args.torch_compile:
        raise CannotProbe("a compiled model is compiled again for other sizes")
    if hasattr(args, "steps_per_generation"):
        raise CannotProbe("its step generates samples")
    if args.ddp_find_unused_parameters or getattr(args, "ddp_static_graph", False):
        raise CannotProbe("DDP keeps a record of the parameters that each pass uses")
    if args.world_size > 1 and trainer.compute_loss_func is not None:
        raise CannotProbe("its loss needs the number of items on all processes")

    def step(batch: Any) -> None:
        # With several processes the trainer would gather their numbers of items, which only scale the loss.
        items = None if args.world_size > 1 else trainer._get_num_items_in_batch([batch], args.device)
        trainer.training_step(model, batch, items)

    @contextmanager
    def muted() -> Iterator[None]:
        before = dict(vars(trainer))
        vars(trainer).update(log=lambda *_, **__: None, current_gradient_accumulation_steps=1)
        try:
            yield
        finally:
            vars(trainer).clear()
            vars(trainer).update(before)

    batches = float(len(loader)) if hasattr(loader, "__len__") else float("inf")
    if args.max_steps > 0:
        batches = min(batches, args.max_steps * args.gradient_accumulation_steps)
    own = [value for name, value in vars(trainer).items() if name not in _DATA]
    return Passes(
        step=step,
        model=model,
        loader=loader,
        batches=batches,
        state=(*own, accelerator.scaler),
        data=tuple(getattr(trainer, name, None) for name in _DATA),
        losses=tuple(losses_of(getattr(trainer, "loss", None))),
        muted=muted,
    )


def losses_of(loss: Any) -> Iterator[Any]:
    """Yield a loss or the losses of several data sets, and the losses that these wrap."""
    if isinstance(loss, dict):
        for each in loss.values():
            yield from losses_of(each)
    elif loss is not None:
        yield loss
        yield from losses_of(getattr(loss, "loss", None))
