"""The passes of a Lightning training for a probe: a part of `_trainer`, which alone imports it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zeus_plugins.training.patches import Patches
from zeus_plugins.training.probe import Passes
from zeus_plugins.training.untouched import CannotProbe

try:
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
except ModuleNotFoundError:
    from pytorch_lightning.loggers.logger import DummyLogger  # type: ignore[assignment]
    from pytorch_lightning.profilers import PassThroughProfiler  # type: ignore[assignment]
    from pytorch_lightning.trainer.connectors.logger_connector.result import (  # type: ignore[assignment]
        _ResultCollection,
    )

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


def passes_of(trainer: Any, module: Any) -> Passes:
    """Return the passes of a trainer before its first step or after an epoch; raise `CannotProbe` if it has none."""
    loaders, strategy = trainer.fit_loop._combined_loader.flattened, trainer.strategy
    if not module.automatic_optimization:
        raise CannotProbe("with manual optimization a pass makes an optimizer step")
    if len(loaders) != 1:
        raise CannotProbe(f"it has {len(loaders)} train loaders")
    if type(strategy).__name__ not in _STRATEGIES:
        raise CannotProbe(f"{type(strategy).__name__} shares the model out")
    if not trainer.training:
        raise CannotProbe("the trainer is validating")
    wrapper = strategy.model
    if getattr(wrapper, "static_graph", False) or getattr(wrapper, "find_unused_parameters", False):
        raise CannotProbe("DDP keeps a record of the parameters that each pass uses")
    loop, connector, precision = trainer.fit_loop.epoch_loop, trainer._logger_connector, trainer.precision_plugin
    scaler = getattr(precision, "scaler", None)

    def step(batch: Any) -> None:
        batch = precision.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = strategy.batch_to_device(batch, dataloader_idx=0)
        connector.on_batch_start(batch)
        arguments = loop._build_kwargs(OrderedDict(), batch, 0)
        module._current_fx_name = "training_step"
        with precision.train_step_context():
            output = module.training_step(*arguments.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise CannotProbe("training_step returns no loss")
        # The strategy's method would call the hooks of all callbacks.
        module.backward(loss if scaler is None else loss * scaler.get_scale())

    @contextmanager
    def muted() -> Iterator[None]:
        patches = Patches()
        patches.set_attribute(loop, "_results", _ResultCollection(training=True))
        patches.set_attribute(trainer, "_loggers", [DummyLogger() for _ in trainer.loggers])
        patches.set_attribute(trainer, "profiler", PassThroughProfiler())
        try:
            yield
        finally:
            patches.undo()

    return Passes(
        step=step,
        model=module,
        loader=loaders[0],
        batches=trainer.num_training_batches,
        state=(vars(connector),),
        data=(getattr(trainer, "datamodule", None),),
        muted=muted,
    )
