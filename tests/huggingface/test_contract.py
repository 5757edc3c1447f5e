"""Transformers' unpromised properties that `zeus_plugins/huggingface/_trainer.py` relies on.

All of them hold with transformers 5.23.0 and accelerate 1.15.0. Where a test fails with a later version, that module
has to change with it.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback, WandbCallback

from tests.support.hf_bench import Classifier, Stream, Tokens, quiet_trainer, tiny_bert
from tests.support.versions import since
from zeus_plugins.huggingface._trainer import (
    HuggingFacePort,
    checkpoint_of,
    checkpointed,
    saved_in_checkpoint,
    trainer_under_construction,
)
from zeus_plugins.training.batches import BatchSplit, process_batch_sizes
from zeus_plugins.training.lr_scaling import scale_learning_rate
from zeus_plugins.training.patches import Patches

SEEN_WITH = "it was seen to hold with transformers 5.23.0 and accelerate 1.15.0"


def holds(condition: object, what: str) -> None:
    assert condition, (
        f"transformers {version('transformers')}, accelerate {version('accelerate')}: {what}; {SEEN_WITH}, and "
        "zeus_plugins/huggingface/_trainer.py needs it"
    )


@dataclass
class Recorder(TrainerCallback):
    """Makes the callback's changes in a real training and records their effects."""

    trainer: Any = None
    under_construction: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    loaders: list[bool] = field(default_factory=list)
    controls: list[bool] = field(default_factory=list)
    states: list[bool] = field(default_factory=list)
    delivered: list[Any] = field(default_factory=list)
    port: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.under_construction.append(trainer_under_construction(state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.events.append("train begin")
        self.states.append(state is self.trainer.state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.events.append("epoch begin")
        self.loaders.append(kwargs["train_dataloader"] is self.trainer.callback_handler.train_dataloader)
        self.delivered.append(self.port.delivered())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.events.append("evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.events.append("save")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.controls.append(control is self.trainer.control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.events.append("train end")


def train(folder: Path, kept: str, **arguments: Any) -> Recorder:
    """Train an epoch at a size different from the arguments, with every patch in place."""
    recorder, patches = Recorder(), Patches()
    trainer = recorder.trainer = quiet_trainer(
        folder, recorder, save_strategy="epoch", lr_scheduler_type="constant", optim="sgd", **arguments
    )
    recorder.port = HuggingFacePort(trainer)
    recorder.port.deliver(BatchSplit(24, 2), patches)

    def keep() -> None:
        recorder.events.append("before save")
        checkpointed(trainer.state)["contract"] = {"kept": kept}

    def scale(_: Any) -> None:
        recorder.events.append(f"scheduler {trainer.optimizer is not None} {trainer.lr_scheduler is not None}")
        scale_learning_rate(cast("Any", [trainer.optimizer]), cast("Any", [trainer.lr_scheduler]), lambda _: 2)

    patches.extend(trainer, "_save_checkpoint", first=keep)
    patches.extend(trainer, "create_scheduler", then=scale)
    patches.extend(
        trainer,
        "_evaluate",
        first=lambda: recorder.events.append("before evaluate"),
        then=lambda _: recorder.events.append("after evaluate"),
    )
    trainer.train(resume_from_checkpoint=arguments["num_train_epochs"] > 1)
    patches.undo()
    return recorder


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Recorder, Path]:
    """Return a training of an epoch, a training resumed from its checkpoint, and their folder."""
    folder = tmp_path_factory.mktemp("contract")
    return train(folder, "first", num_train_epochs=1), train(folder, "second", num_train_epochs=2), folder


Trainings = tuple[Recorder, Recorder, Path]


def test_constructor_calls_on_init_end_and_is_on_stack(trainings: Trainings) -> None:
    first, _, _ = trainings
    holds(first.under_construction == [first.trainer], "on_init_end is called within the constructor of the Trainer")


def test_train_batch_size_follows_attribute(trainings: Trainings) -> None:
    first, _, _ = trainings
    holds(first.trainer.model.seen_sizes == [24] * 7, "get_train_dataloader() gives the loader that trains")
    holds(first.trainer.state.train_batch_size == 24, "Trainer._train_batch_size is the size in the trainer's state")
    holds(first.trainer.state.global_step == first.trainer.state.max_steps == 4, "max_steps follows the arguments")
    trainer = first.trainer
    holds(
        trainer._train_batch_size == trainer.args.train_batch_size, "Trainer._train_batch_size = args.train_batch_size"
    )
    before = trainer.get_total_train_batch_size(trainer.args)
    patches = Patches()
    patches.set_attribute(trainer, "_train_batch_size", 3 * trainer._train_batch_size)
    holds(
        trainer.get_total_train_batch_size(trainer.args) == 3 * before,
        "get_total_train_batch_size() is a multiple of Trainer._train_batch_size",
    )
    patches.undo()


def test_loader_of_each_epoch_is_with_callback_handler(trainings: Trainings) -> None:
    for recorder in trainings[:2]:
        holds(recorder.loaders == [True], "callback_handler.train_dataloader is the loader of the epoch")
        holds(recorder.delivered == [{24.0}], "the loader of the epoch says its batch size, also on resuming")


def test_events_come_in_expected_order(trainings: Trainings) -> None:
    epoch = ["epoch begin", "before evaluate", "evaluate", "after evaluate", "before save", "save"]
    for recorder in trainings[:2]:
        holds(
            recorder.events == ["scheduler True True", "train begin", *epoch, "train end"],
            "train() calls create_scheduler, _evaluate and _save_checkpoint of the instance, in this order",
        )


def test_hooks_get_state_and_control_of_trainer(trainings: Trainings) -> None:
    for recorder in trainings[:2]:
        holds(recorder.states == [True], "the state of an event is Trainer.state")
        holds(all(recorder.controls), "the control of an event is Trainer.control")


def test_rates_of_checkpoint_follow_create_scheduler(trainings: Trainings) -> None:
    first, second, _ = trainings
    holds(set(first.rates) == {0.2}, "rates that are scaled after create_scheduler() are in force")
    holds(set(second.rates) == {0.2}, "the optimizer's state of a checkpoint is loaded after create_scheduler()")


def test_state_of_callbacks_is_saved_with_checkpoints(trainings: Trainings) -> None:
    first, _, folder = trainings
    args = first.trainer.args
    holds(saved_in_checkpoint(folder / "checkpoint-4", args, "contract") == {"kept": "first"}, "named checkpoints")
    holds(saved_in_checkpoint(True, args, "contract") == {"kept": "second"}, "the latest checkpoint of the folder")
    holds(saved_in_checkpoint(True, args, "nobody's") is None, "what nobody kept is not there")
    saved = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    holds("contract" in saved["stateful_callbacks"], "state.stateful_callbacks is saved in trainer_state.json")


def test_train_can_be_replaced_on_instance(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = quiet_trainer(tmp_path, recorder, trainer_options={"model": Classifier()})
    vars(trainer)["train"] = lambda: "its own"
    holds(trainer.train() == "its own", "Trainer.train can be replaced on an instance")
    holds(recorder in trainer.callback_handler.callbacks, "callback_handler.callbacks lists the trainer's callbacks")


def test_arguments_of_train_are_known() -> None:
    first, second, *_ = list(inspect.signature(Trainer.train).parameters)[1:]
    holds((first, second) == ("resume_from_checkpoint", "trial"), "train(resume_from_checkpoint, trial, …)")
    assert checkpoint_of("folder", None, "more") == "folder"
    assert checkpoint_of(trial={"learning_rate": 0.5}) is None


@pytest.mark.parametrize("split_batches", [False, True])
def test_samplers_of_accelerate_keep_batch_size(split_batches: bool) -> None:
    inner = BatchSampler(SequentialSampler(range(96)), 24, drop_last=False)
    shard = BatchSamplerShard(inner, 2, 0, split_batches=split_batches)
    holds(shard.batch_size == 24, "BatchSamplerShard.batch_size")
    holds(shard.split_batches is split_batches, "BatchSamplerShard.split_batches")
    holds(shard.batch_sampler is inner, "BatchSamplerShard.batch_sampler")
    stream = IterableDatasetShard(Stream(), batch_size=24, num_processes=2, split_batches=split_batches)
    holds((stream.batch_size, stream.split_batches) == (24, split_batches), "IterableDatasetShard.split_batches")


@pytest.mark.parametrize("dispatch_batches", [None, True])
def test_loaders_of_accelerate_state_batch_size(dispatch_batches: bool | None) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = dispatch_batches
    loader = accelerator.prepare(DataLoader(list(range(96)), batch_size=24))
    holds(process_batch_sizes(loader, 1) == {24.0}, "a prepared loader wraps base_dataloader")
    holds(hasattr(accelerator, "split_batches"), "Accelerator.split_batches")


@since("transformers", "5.0", "it has no train_sampling_strategy")
def test_rebalancing_sampler_states_size(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        trainer_options={"model": tiny_bert(), "train_dataset": Tokens(), "eval_dataset": Tokens()},
        train_sampling_strategy="batch_rebalance",
    )
    trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    holds(
        HuggingFacePort(trainer).delivered() == {float(trainer.args.train_batch_size)},
        "the sampler of train_sampling_strategy='batch_rebalance' has effective_batch_size",
    )


def test_trainer_states_where_training_runs(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_options={"model": Classifier()})
    holds(trainer.is_deepspeed_enabled is False, "Trainer.is_deepspeed_enabled")
    holds(trainer.args.auto_find_batch_size is False, "TrainingArguments.auto_find_batch_size")
    args = trainer.args
    ranks = (args.process_index, args.local_process_index, args.world_size)
    holds(ranks == (0, 0, 1), "TrainingArguments.process_index, .local_process_index and .world_size")


def test_integrations_keep_loggers_at_known_attributes() -> None:
    kinds: dict[str, Any] = {"tb_writer": TensorBoardCallback, "_wandb": WandbCallback, "_ml_flow": MLflowCallback}
    for name, kind in kinds.items():
        holds(f"self.{name} = " in inspect.getsource(kind.__init__), f"{kind.__name__} has {name} from the start")
        holds(hasattr(kind, "on_train_begin"), f"{kind.__name__} begins in on_train_begin")
    holds(ProgressCallback().training_bar is None, "a progress bar is made when the training begins")
