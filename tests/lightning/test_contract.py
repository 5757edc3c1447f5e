"""Lightning's unpromised properties that `zeus_plugins/lightning/_trainer.py` relies on.

All of them hold with Lightning 2.5.0 and 2.6.6. Where a test fails with a later version, that module has to change with
it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.support.lightning_bench import (
    QUIET,
    Classifier,
    HardCodedModule,
    HyperparameterModule,
    SizedModule,
    digits,
    quiet_trainer,
)
from zeus_plugins.lightning._trainer import (
    STEP_HOOKS,
    LightningPort,
    continues_checkpoint,
    delivered_batch_sizes,
    epochs_trained,
    finders,
    hide_step_hooks,
    is_rehearsal,
)
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.patches import Patches

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]

SEEN_WITH = "it was seen to hold with Lightning 2.5.0 and 2.6.6"


def holds(condition: object, what: str) -> None:
    assert condition, (
        f"Lightning {version('lightning')}: {what}; {SEEN_WITH}, and zeus_plugins/lightning/_trainer.py needs it"
    )


@dataclass
class Recorder(Callback):
    """Makes the callback's changes in a real fit and records their effects."""

    patches: Patches = field(default_factory=Patches)
    events: list[str] = field(default_factory=list)
    continues: list[bool] = field(default_factory=list)
    combined: list[Any] = field(default_factory=list)
    delivered: list[Any] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        self.continues.append(continues_checkpoint(trainer))
        self.combined.append(trainer.fit_loop._combined_loader)
        LightningPort(trainer, pl_module).deliver(BatchSplit(24, 2), self.patches)
        self.patches.extend(trainer.fit_loop.epoch_loop, "run", first=lambda: self._note("check"))
        hide_step_hooks(self, self.patches)

    def on_load_checkpoint(self, *_: Any) -> None:
        self._note("load checkpoint")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._note("fit start")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._note("epoch start")
        self.combined.append(trainer.fit_loop._combined_loader)
        self.delivered.append(delivered_batch_sizes(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if not trainer.sanity_checking:
            self._note("validation end")
            self.epochs.append(epochs_trained(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._note("epoch end")

    def _note(self, event: str) -> None:
        self.events.append(event)


@dataclass
class Fits:
    """A fit of two epochs, and a third epoch that resumes from its checkpoint."""

    first: Recorder
    second: Recorder
    module: HardCodedModule
    trainer: Trainer


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Fits:
    checkpoint = tmp_path_factory.mktemp("contract") / "second.ckpt"
    first, second, module = Recorder(), Recorder(), HardCodedModule()
    trainer = quiet_trainer(first, max_epochs=2, val_check_interval=3)
    trainer.fit(module)
    trainer.save_checkpoint(checkpoint)
    quiet_trainer(second, max_epochs=3).fit(HardCodedModule(), ckpt_path=checkpoint)
    return Fits(first, second, module, trainer)


def test_every_way_to_train_loader_leads_through_single_method(fits: Fits) -> None:
    holds(set(fits.module.seen_sizes) == {24}, "fit_loop._data_source.dataloader() gives every train loader")
    holds(fits.module.estimated_steps == 8, "the estimate of the steps asks fit_loop._data_source.dataloader(), too")
    holds(fits.module.seen_accumulation == {2}, "Trainer.accumulate_grad_batches can be set in setup()")


def test_loop_holds_loaders_in_use(fits: Fits) -> None:
    before, *during = fits.first.combined
    holds(before is None, "fit_loop._combined_loader is None before the loaders are made")
    holds(
        all(isinstance(each, CombinedLoader) for each in during), "fit_loop._combined_loader holds the loaders in use"
    )
    holds(fits.first.delivered == [[24], [24]], "CombinedLoader.flattened lists the loaders in use")


def test_epoch_is_single_call_of_loop_run(fits: Fits) -> None:
    epoch = ["epoch start", "check", "validation end", "validation end", "epoch end"]
    holds(
        fits.first.events == ["fit start", *epoch, *epoch],
        "epoch_loop.run trains one epoch, after on_train_epoch_start",
    )


def test_progress_of_epoch_is_known(fits: Fits) -> None:
    holds(
        fits.first.epochs == [3 / 7, 6 / 7, 10 / 7, 13 / 7],
        "epoch_loop.batch_progress.current.ready counts an epoch's batches, is_last_batch its last one",
    )


def test_running_call_knows_checkpoint(fits: Fits) -> None:
    holds("ckpt_path" in inspect.signature(Trainer._run).parameters, "Trainer._run has an argument ckpt_path")
    holds(fits.first.continues == [False], "setup() runs within Trainer._run, whose ckpt_path is None without one")
    holds(fits.second.continues == [True], "setup() runs within Trainer._run, whose ckpt_path is set with one")
    holds(fits.second.events[:2] == ["load checkpoint", "fit start"], "on_load_checkpoint comes before on_fit_start")


def test_strategies_state_whether_checkpoints_load_late() -> None:
    holds(
        quiet_trainer().strategy.restore_checkpoint_after_setup is False,
        "strategies have restore_checkpoint_after_setup",
    )
    holds(FSDPStrategy().restore_checkpoint_after_setup, "FSDP has restore_checkpoint_after_setup = True")


def test_hooks_of_each_step_can_be_hidden(fits: Fits) -> None:
    for hook in STEP_HOOKS:
        holds(callable(getattr(Callback, hook, None)), f"Callback has a hook {hook}")
    holds(fits.trainer.global_step == 8, "a hook of a callback that is None is left out")
    holds(fits.first.on_train_batch_end is None, "a hook of a callback can be None")


@pytest.mark.parametrize("kind", [BatchSizeFinder, LearningRateFinder])
def test_finder_of_tuner_leaves_early(kind: type[Any]) -> None:
    holds(kind()._early_exit is False, f"{kind.__name__}._early_exit is False")
    finder = kind()
    trainer = quiet_trainer(finder)
    assert finders(trainer, kind.__name__) == [finder]
    assert not is_rehearsal(trainer)


def test_tuner_marks_early_exit_of_finder(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Look(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
            seen.append(is_rehearsal(trainer))

    module = SizedModule()
    Tuner(quiet_trainer(Look(), default_root_dir=tmp_path)).scale_batch_size(module, max_trials=1, steps_per_trial=1)
    holds(seen == [True], "a Tuner sets its finder's _early_exit before callbacks are set up")


def test_dry_run_is_known() -> None:
    holds(is_rehearsal(quiet_trainer(fast_dev_run=True)), "Trainer(fast_dev_run=True).fast_dev_run is true")
    holds(not is_rehearsal(quiet_trainer()), "Trainer().fast_dev_run is false")


def made_anew(module: LightningModule) -> Any:
    """Return the module's resized loader as Lightning makes it again for each of several devices."""
    made: list[Any] = []

    class Resize(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
            LightningPort(trainer, pl_module).deliver(BatchSplit(24, 1), Patches())

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
            loader = _request_dataloader(trainer.fit_loop._data_source)
            made.append(_update_dataloader(loader, SequentialSampler(loader.dataset)))

    quiet_trainer(Resize(), max_steps=1, limit_val_batches=0).fit(module)
    (anew,) = made
    return anew


class Halves(BatchSampler):
    """A batch sampler with a default for the argument of its size."""

    def __init__(self, sampler: Any, batch_size: int = 16, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)


@pytest.mark.parametrize("is_sampler", [False, True], ids=["loader", "batch sampler"])
@pytest.mark.parametrize(
    ("arguments", "keywords"), [((16,), {}), ((), {"batch_size": 16}), ((), {})], ids=["position", "keyword", "default"]
)
def test_lightning_makes_loader_again_from_saved_arguments(
    arguments: tuple[int, ...], keywords: dict[str, int], *, is_sampler: bool
) -> None:
    class Module(Classifier):
        """Makes its loader in the method where Lightning records the arguments."""

        def train_dataloader(self) -> Any:
            data = digits()[0]
            if is_sampler:
                return DataLoader(data, batch_sampler=Halves(SequentialSampler(data), *arguments, **keywords))
            return DataLoader(data, *arguments, **keywords)

    anew = made_anew(Module())
    batcher = anew.batch_sampler if is_sampler else anew
    holds(
        batcher.batch_size == 24, "loaders and batch samplers are made anew from __pl_saved_args and __pl_saved_kwargs"
    )


def test_metric_is_tensor_visible_to_every_callback(fits: Fits) -> None:
    holds(isinstance(fits.trainer.callback_metrics["score"], torch.Tensor), "Trainer.callback_metrics holds tensors")


def test_hyperparameters_for_loggers_can_be_extended() -> None:
    module: Any = HyperparameterModule()
    holds(module._log_hyperparams is True, "a module that has saved its hyperparameters for loggers says so")
    module._hparams_initial["zeus/job_id"] = "digits"
    holds(module.hparams_initial["zeus/job_id"] == "digits", "hparams_initial is a copy of _hparams_initial")
    holds("_hparams_initial" not in vars(Classifier()), "a module that has saved none has no _hparams_initial")


def test_source_of_loaders_knows_owner(fits: Fits) -> None:
    holds(
        isinstance(fits.trainer.fit_loop._data_source.instance, LightningModule), "_data_source.instance is the module"
    )


def test_progress_bars_ask_for_metrics_by_single_method() -> None:
    for bar in (TQDMProgressBar, RichProgressBar):
        holds("self.get_metrics(" in inspect.getsource(bar), f"{bar.__name__} calls get_metrics")


def test_settings_in_steps_are_found_at_known_attributes() -> None:
    trainer = quiet_trainer(ModelCheckpoint(every_n_train_steps=7), enable_checkpointing=True, max_steps=9)
    (saver,) = finders(trainer, "ModelCheckpoint")
    holds(saver._every_n_train_steps == 7, "ModelCheckpoint keeps every_n_train_steps")
    holds(trainer._accelerator_connector.use_distributed_sampler is True, "the connector keeps use_distributed_sampler")


def test_optimizers_are_configured_again_without_trace() -> None:
    module, seen = HyperparameterModule(), []

    class Again(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            before, kept = list(trainer.optimizers), dict(vars(pl_module))
            seen.append(len(_init_optimizers_and_lr_schedulers(pl_module)[0]))
            holds(trainer.optimizers == before, "the trainer keeps its optimizers")
            holds(vars(pl_module).keys() == kept.keys(), "the module gets no new attributes")

    quiet_trainer(Again()).fit(module)
    holds(seen == [1], "_init_optimizers_and_lr_schedulers returns the optimizers")
