"""Real trainings of tiny models with the Hugging Face Trainer against a real server process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
)

from tests.support import hf_bench as models
from tests.support.frameworks import Work
from tests.support.hf_bench import USERS_SIZE, Bench, Classifier, Digits, Watch, sizes_of, val_digits
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48, NEVER, NEXT_SIZE, SERVERS_SIZE
from tests.support.versions import since
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError, ZeusBSOTrainFailError
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.huggingface._trainer import HuggingFacePort
from zeus_plugins.protocol import EndReason, TrialState
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.patches import Patches

# Batch size: the ways in which a user may give model, data and arguments.
LOSS = {"monitor": "loss", "target": 1000.0, "higher_is_better_metric": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loader in a subclass": {"kind": models.HardCodedTrainer},
    "prepared loader in a subclass": {"kind": models.PreparedTrainer},
    "loader built once": {"kind": models.BuiltOnceTrainer},
    "model_init": {"data": {"model_init": lambda: Classifier()}},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "stream": {"data": {"train_dataset": models.Stream()}, "max_steps": 12},
    "stream in shares": {
        "data": {"train_dataset": models.Stream()},
        "max_steps": 12,
        "accelerator_config": {"dispatch_batches": False},
    },
    "workers that stay": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "BERT by length": {
        "data": {"model": models.tiny_bert, "train_dataset": models.Tokens(), "eval_dataset": models.Tokens()},
        "train_sampling_strategy": "group_by_length",
    },
    "BERT in balanced batches": {
        "data": {"model": models.tiny_bert, "train_dataset": models.Tokens(), "eval_dataset": models.Tokens()},
        "train_sampling_strategy": "batch_rebalance",
    },
    "Seq2SeqTrainer": {
        "kind": Seq2SeqTrainer,
        "data": {
            "model": models.tiny_t5,
            "train_dataset": models.Tokens(to_sequence=True),
            "eval_dataset": models.Tokens(to_sequence=True),
            "compute_metrics": None,
        },
        "job": LOSS,
    },
}


def made(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a new model for each test."""
    data = dict(options.get("data", {}))
    if "model" in data:
        data["model"] = data["model"]()
    return {**{name: value for name, value in options.items() if name != "job"}, "data": data}


# Loading the code of a model from transformers takes seconds, and so does the end of persistent workers.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=pytest.mark.slow if "model" in way.get("data", {}) or "stay" in name else ())
        for name, way in WAYS.items()
    ],
)
def test_every_way_trains_at_size_of_server(bench: Bench, way: dict[str, Any]) -> None:
    spec = dict(way.get("job", {}))
    callback = bench.callback(monitor=spec.pop("monitor", "score"), job=bench.job(**spec))
    trainer = bench.trainer(callback, **made(way))
    trainer.train()
    assert sizes_of(trainer) == EPOCH_OF_48
    assert trainer.state.global_step == trainer.state.max_steps == len(EPOCH_OF_48)
    assert trainer.state.train_batch_size == SERVERS_SIZE
    assert bench.only_trial().state is TrialState.COMPLETED


def test_deepspeed_is_refused_before_trial(bench: Bench) -> None:
    trainer = bench.trainer(bench.callback())
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ZeusBSOConfigError, match="cannot set the batch size of DeepSpeed: train without the callback"):
        trainer.train()
    assert not bench.is_registered()


def test_max_steps_within_first_epoch_are_refused_before_trial(bench: Bench) -> None:
    trainer = bench.trainer(bench.callback(steps="unchanged"), max_steps=6)
    problem = r"^batch size 24 cannot .* at 24, .*max_steps=6\) ends within the first epoch, which has 7 steps"
    with pytest.raises(ZeusBSOConfigError, match=problem):
        trainer.train()
    assert not bench.is_registered()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"data": {"train_dataset": models.Digits(length=36)}}, "a batch is larger than the data of 36 samples"),
        ({"eval_strategy": "steps", "eval_steps": 5}, r"the whole training has 4 steps, fewer than .*eval_steps=5\)"),
        (
            {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5},
            r"the training ends before .*\(eval_delay=5\), after 4",
        ),
    ],
    ids=["little data", "eval_steps", "eval_delay"],
)
def test_described_size_without_evaluation_is_refused_before_trial(
    bench: Bench, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"^batch size 48 cannot be trained here: at 48, {problem}"):
        bench.trainer(bench.callback(steps="unchanged"), **options).train()
    assert not bench.is_registered()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"data": {"train_dataset": models.Stream()}, "max_steps": 30, "eval_strategy": "steps", "eval_steps": 10}, 30),
        ({"num_train_epochs": 1.5, "eval_strategy": "steps", "eval_steps": 5}, 17),
        ({"num_train_epochs": 1.5, "eval_strategy": "no"}, 17),
        ({"max_steps": 25, "eval_strategy": "steps", "eval_steps": 10}, 25),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_steps_at_own_size_equal_steps_without_callback(bench: Bench, options: dict[str, Any], steps: int) -> None:
    options = {"lr_scheduler_type": "constant", "logging_strategy": "epoch"} | options
    is_evaluated = options.get("eval_strategy") != "no"
    target = (2.0, "score") if is_evaluated else (-1.0, "loss")
    alone, watched = bench.trainer(**options), bench.trainer(bench.guessing(*target, on_failure="stop"), **options)
    for trainer in (alone, watched):
        trainer.train()
    assert (alone.state.global_step, watched.state.global_step) == (steps, steps)
    assert bench.only_trial().state is TrialState.EXHAUSTED


def test_optimizer_without_schedule_gets_schedule_of_trial_length(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.complete_first_trial(bench.job())
    model, rates = Classifier(), Watch()
    data = {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    bench.trainer(bench.callback(), rates, data=data, lr_scheduler_type="linear").train()
    assert rates.rates == pytest.approx([0.1 * (1 - step / 7) for step in range(7)])
    assert "docs/schedules.md" not in caplog.text


class Meddler(TrainerCallback):
    """Sets a different accumulation after all preparations."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        args.gradient_accumulation_steps = 4


def test_accumulation_changed_later_by_second_callback_is_refused(bench: Bench) -> None:
    trainer = bench.trainer(bench.callback(), Meddler())
    with pytest.raises(ZeusBSOConfigError, match=r"deliver \[48\] samples per batch instead of 12"):
        trainer.train()
    assert sizes_of(trainer) == []


# Restoration of every change


@pytest.mark.parametrize("error", [None, RuntimeError("the user's own")], ids=["after train", "after an error"])
def test_every_change_is_restored(bench: Bench, error: Exception | None) -> None:
    trainer = bench.trainer(
        bench.callback(),
        kind=models.BuiltOnceTrainer,
        data={"model": Classifier(Work({2: error} if error else None))},
        gradient_accumulation_steps=2,
        auto_find_batch_size=error is None,
    )
    before = trainer.args.to_dict()
    loader = trainer.get_train_dataloader()
    with pytest.raises(RuntimeError, match="the user's own") if error else contextlib.nullcontext():
        trainer.train()
    assert sizes_of(trainer)[0] == SERVERS_SIZE // 2
    assert trainer.args.to_dict() == before
    assert trainer._train_batch_size == USERS_SIZE
    assert cast("Any", loader).base_dataloader.batch_sampler.batch_size == USERS_SIZE
    assert set(vars(trainer)) & {"get_train_dataloader", "create_scheduler", "_save_checkpoint"} == set()


# The learning rate


class OwnRateTrainer(Trainer):
    """Makes an optimizer with a rate that differs from the arguments."""

    def create_optimizer(self, model: Any = None) -> Any:  # noqa: ARG002
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(cast("torch.nn.Module", self.model).parameters(), lr=0.1)
        return self.optimizer


def own_optimizer() -> dict[str, Any]:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"data": {"model": model, "optimizers": (optimizer, LambdaLR(optimizer, lambda step: 0.9**step))}}


RATES: dict[str, Callable[[], dict[str, Any]]] = {
    "linear": dict,
    "floor": lambda: {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.02}},
    "polynomial": lambda: {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.02}},
    "own optimizer": own_optimizer,
    "optimizer in a subclass": lambda: {"kind": OwnRateTrainer},
}


@pytest.mark.parametrize("make", RATES.values(), ids=RATES.keys())
def test_learning_rate_follows_batch_size(bench: Bench, make: Callable[[], dict[str, Any]]) -> None:
    job = bench.job()
    bench.complete_first_trial(job)
    unscaled, scaled = Watch(), Watch()
    bench.trainer(unscaled, **make(), per_device_train_batch_size=NEXT_SIZE).train()
    trainer = bench.trainer(bench.callback(job, lr_scaling="sqrt", steps="unchanged"), scaled, **make())
    trainer.train()
    assert sizes_of(trainer) == EPOCH_OF_24
    assert scaled.rates == pytest.approx([rate * 0.5**0.5 for rate in unscaled.rates])


def test_default_rule_raises_rate_above_own_size_and_says_so(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    job = bench.job(batch_sizes=(48, 96))
    bench.complete_first_trial(job)
    watch = Watch()
    trainer = bench.trainer(bench.callback(job), watch, lr_scheduler_type="constant")
    trainer.train()
    assert watch.rates == pytest.approx([trainer.args.learning_rate * 2**0.5] * len(watch.rates))
    assert "zeus: learning rate × 1.41 (sqrt, for AdamW)\n" in capsys.readouterr().err


# Reports


@pytest.mark.parametrize(
    "evaluation",
    [
        {"eval_strategy": "epoch"},
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 4},
            marks=since("transformers", "5.0", "evaluation by steps leaves out the last step"),
        ),
    ],
)
def test_epoch_cut_short_by_max_steps_counts_as_whole_epoch(bench: Bench, evaluation: dict[str, Any]) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=3), on_failure="stop", steps="unchanged")
    watch = Watch(callback)
    bench.trainer(callback, watch, max_steps=10, **evaluation).train()
    assert watch.epochs == [1.0, 2.0, 3.0]
    assert bench.only_trial().state is TrialState.EXHAUSTED


def test_evaluation_before_first_step_is_not_reported(bench: Bench) -> None:
    callback = bench.callback()
    watch = Watch(callback)
    bench.trainer(callback, watch, eval_on_start=True).train()
    assert watch.epochs == [None, 1.0]


class EvaluatesMore(TrainerCallback):
    """A script's own evaluation of further data, within the epoch."""

    trainer: Trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            self.trainer.evaluate(Digits(), metric_key_prefix="train")


def test_evaluations_of_further_data_are_not_reported(bench: Bench) -> None:
    more = EvaluatesMore()
    callback = bench.callback(bench.job(0.9))
    trainer = bench.trainer(more, callback, scores=(0.1, 0.9))
    more.trainer = trainer
    trainer.train()
    assert bench.only_trial().metric == 0.9


SETS = {"left": val_digits(), "right": val_digits()}


@pytest.mark.parametrize(("monitor", "metric"), [("eval_left_score", 0.3), ("right_score", 0.7)])
def test_monitored_evaluation_set_of_several_is_reported(bench: Bench, monitor: str, metric: float) -> None:
    callback = bench.callback(bench.job(0.1), monitor=monitor)
    bench.trainer(callback, scores=(0.3, 0.7), data={"eval_dataset": SETS}).train()
    assert bench.only_trial().metric == metric


def test_watched_metrics_of_every_evaluation_set_reach_last_report(bench: Bench) -> None:
    names = ("right_score", "eval_right_score", "eval_left_score")  # The last name is the monitored metric.
    callback = bench.callback(bench.job(0.1), monitor="left_score", watch=names)
    bench.trainer(callback, scores=(0.3, 0.7), data={"eval_dataset": SETS}).train()
    trial = bench.only_trial()
    assert (trial.state, trial.metric) == (TrialState.COMPLETED, 0.3)
    assert trial.watched == {"right_score": 0.7, "eval_right_score": 0.7}


def test_loss_of_each_epoch_is_reported_without_evaluations(bench: Bench) -> None:
    job = bench.job(-1.0, higher_is_better_metric=False, max_epochs=2)
    callback = bench.callback(job, "loss", on_failure="stop")
    trainer = bench.trainer(callback, eval_strategy="no", num_train_epochs=2, logging_strategy="steps", logging_steps=3)
    trainer.train()
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.EXHAUSTED, 2)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trial.metric == pytest.approx(losses[-1])
    assert callback.trial.time_s == 2.0


class EvaluatesByHand(TrainerCallback):
    """Evaluates after each epoch."""

    trainer: Trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.trainer.evaluate()


def test_evaluations_made_by_callback_are_reported(bench: Bench) -> None:
    by_hand, callback = EvaluatesByHand(), bench.callback(bench.job(0.9, max_epochs=3), "eval_score")
    trainer = bench.trainer(by_hand, callback, scores=(0.1, 0.9), eval_strategy="no", num_train_epochs=3)
    by_hand.trainer = trainer
    trainer.train()
    trial = bench.only_trial()
    assert (trial.state, trial.metric, trial.epochs) == (TrialState.COMPLETED, 0.9, 2)
    assert trainer.state.epoch == 2


class PassesOn(ZeusBSOTrainerCallback):
    """A user's subclass that passes metrics and logs on by position, as transformers' own callbacks name them."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        super().on_evaluate(args, state, control, metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        super().on_log(args, state, control, logs)


@pytest.mark.parametrize(("monitor", "strategy", "target"), [("score", "epoch", -1.0), ("loss", "no", 100.0)])
def test_subclass_passes_metrics_and_logs_by_position(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, monitor: str, strategy: str, target: float
) -> None:
    monkeypatch.setattr(bench, "BatchSize", PassesOn)
    bench.trainer(bench.callback(bench.job(target), monitor), eval_strategy=strategy).train()
    assert bench.only_trial().state is TrialState.COMPLETED


class LoggingTrainer(Trainer):
    """Logs a metric of its own at every step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.log({"progress": self.state.global_step / 10})
        return super().training_step(*args, **kwargs)


def test_metric_logged_by_script_is_reported_without_evaluations(bench: Bench) -> None:
    callback = bench.callback(bench.job(0.6, max_epochs=3, higher_is_better_metric=True), "progress")
    trainer = bench.trainer(callback, kind=LoggingTrainer, eval_strategy="no", num_train_epochs=3)
    trainer.train()
    assert (bench.only_trial().metric, bench.only_trial().epochs) == (0.7, 2)
    assert trainer.state.epoch == 2


@pytest.mark.parametrize("monitor", ["eval_loss", "score"])
def test_evaluation_metric_without_evaluations_is_refused_before_trial(bench: Bench, monitor: str) -> None:
    trainer = bench.trainer(bench.callback(monitor=monitor), eval_strategy="no")
    with pytest.raises(ZeusBSOConfigError, match="set eval_strategy='epoch' or 'steps'"):
        trainer.train()
    assert not bench.is_registered()


class AddingTrainer(Trainer):
    """Adds a metric to the log of an evaluation, but not to the evaluation's result."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "eval_added_score": 0.7} if "eval_loss" in logs else logs, start_time)


@pytest.mark.parametrize(
    ("monitor", "sets", "known"),
    [("accuracy", False, "['loss']"), ("eval_loss", True, "['left_loss', 'right_loss']")],
)
def test_metric_missing_from_every_evaluation_is_refused_before_trial(
    bench: Bench, monitor: str, *, sets: bool, known: str
) -> None:
    data: dict[str, Any] = {"compute_metrics": None}
    if sets:
        data["eval_dataset"] = {"left": val_digits(), "right": val_digits()}
    trainer = bench.trainer(bench.callback(monitor=monitor), data=data)
    with pytest.raises(ZeusBSOConfigError, match=f"'{monitor}' will never be among .*one of {re.escape(known)}"):
        trainer.train()
    assert not bench.is_registered()


def test_metric_added_to_log_of_evaluation_is_reported(bench: Bench) -> None:
    bench.trainer(bench.callback(monitor="added_score"), kind=AddingTrainer).train()
    assert bench.only_trial().metric == 0.7


class ComparedTrainer(Trainer):
    """A trainer without a hash, like TRL's for KTO."""

    def __eq__(self, other: object) -> bool:
        return self is other


def test_trainer_without_hash_has_a_trial(bench: Bench) -> None:
    trainer = bench.trainer(bench.callback(), kind=ComparedTrainer)
    trainer.train()
    assert bench.only_trial().state is TrialState.COMPLETED


def test_size_refused_by_kto_is_an_obstacle(bench: Bench) -> None:
    trainer = bench.trainer(per_device_train_batch_size=2)
    port = HuggingFacePort(trainer)
    assert port.facts(Patches(), counts_samples=True).obstacle(BatchSplit(1, 2)) is None
    vars(trainer)["calculate_KL"] = True
    obstacle = port.facts(Patches(), counts_samples=True).obstacle
    assert obstacle(BatchSplit(2, 1)) is None
    assert "KTO compares the samples of a device's batch" in (obstacle(BatchSplit(1, 2)) or "")


def test_phases_of_adalora_and_of_a_constant_schedule_follow_samples(bench: Bench) -> None:
    adapter = SimpleNamespace(total_step=70, tinit=7, tfinal=14, deltaT=1)
    plain = SimpleNamespace(r=8)
    trainer = bench.trainer(per_device_train_batch_size=8, lr_scheduler_kwargs={"num_decay_steps": 21, "num_cycles": 1})
    vars(trainer.model)["peft_config"] = {"default": adapter, "plain": plain}
    patches, own = Patches(), vars(adapter).copy()
    _, told = HuggingFacePort(trainer).follow_samples(8, BatchSplit(56, 1), patches)
    assert vars(adapter) == {"total_step": 10, "tinit": 1, "tfinal": 2, "deltaT": 1}
    assert trainer.args.lr_scheduler_kwargs == {"num_decay_steps": 3, "num_cycles": 1}
    assert {"total_step 70 → 10", "num_decay_steps 21 → 3"} <= {*told}
    patches.undo()
    assert vars(adapter) == own
    assert trainer.args.lr_scheduler_kwargs["num_decay_steps"] == 21


# Verdicts


def test_target_reached_within_epoch_ends_training_immediately(bench: Bench) -> None:
    bench.complete_first_trial(bench.job(higher_is_better_metric=True))
    trainer = bench.trainer(bench.callback(), eval_strategy="steps", eval_steps=4)
    trainer.train()
    assert sizes_of(trainer) == [24, 24]  # the samples of four steps of the script


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        self.entries.append(dict(logs))


@pytest.mark.parametrize("has_bar", [False, True])
def test_values_for_trackers_are_not_printed(
    bench: Bench, capsys: pytest.CaptureFixture[str], *, has_bar: bool
) -> None:
    logs = Logs()
    bench.trainer(bench.callback(), logs, disable_tqdm=not has_bar).train()
    assert any("zeus/cost_j" in entry for entry in logs.entries)
    printed = capsys.readouterr()
    assert "eval_score" in printed.out + printed.err
    assert "zeus/" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("others", "options", "rule"),
    [
        ([], {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 3}, "max_steps=4"),
        (
            [EarlyStoppingCallback(1)],
            {
                "num_train_epochs": 3,
                "save_strategy": "epoch",
                "metric_for_best_model": "score",
                "load_best_model_at_end": True,
            },
            "EarlyStoppingCallback(early_stopping_patience=1)",
        ),
    ],
    ids=["max_steps", "another callback"],
)
def test_training_cut_short_fails_trial(bench: Bench, others: list[Any], options: dict[str, Any], rule: str) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=3), steps="unchanged")
    trainer = bench.trainer(callback, *others, **options)
    with pytest.raises(ZeusBSOTrainFailError, match=r"^ended by") as raised:
        trainer.train()
    ended = f"ended by {rule} before score reached {NEVER:g} (it was {callback.trial.metric:.4g})"
    assert str(raised.value).startswith(f"{ended}; ")
    assert (callback.has_trial, callback.converged, callback.summary.outcome) == (True, False, ended)
    trial = bench.only_trial()
    assert (trial.state, trial.end_reason) == (TrialState.FAILED, EndReason.ENDED_EARLY)
    assert (trial.message or "").endswith(f"({rule})")


# Errors


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_auto_find_batch_size_trains_at_smaller_size_after_out_of_memory(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    callback, model = bench.callback(), Classifier(Work({1: OUT_OF_MEMORY}))
    trainer = bench.trainer(callback, data={"model": model}, auto_find_batch_size=True)
    trainer.train()
    first, second = bench.view().trials
    assert (first.batch_size, first.state) == (SERVERS_SIZE, TrialState.INFEASIBLE)
    assert (second.state, callback.trial.batch_size) == (TrialState.COMPLETED, second.batch_size)
    assert second.batch_size < first.batch_size
    # These are the batches after the failed batch, without the incomplete last batch.
    assert set(sizes_of(trainer)[1:-1]) == {second.batch_size}
    line = f"batch size {SERVERS_SIZE} ran out of memory: auto_find_batch_size asks for a smaller one"
    assert line in capsys.readouterr().err
    assert trainer.args.auto_find_batch_size is True


def test_auto_find_batch_size_raises_out_of_memory_of_every_size(bench: Bench) -> None:
    model = Classifier(Work(dict.fromkeys(range(1, 10), OUT_OF_MEMORY)))
    trainer = bench.trainer(bench.callback(), data={"model": model}, auto_find_batch_size=True)
    with pytest.raises(ZeusBSORuntimeError, match=f"even batch size {NEXT_SIZE} ran out of memory"):
        trainer.train()
    assert {each.state for each in bench.view().trials} == {TrialState.INFEASIBLE}


def test_out_of_memory_after_a_step_ends_training_and_excludes_size(bench: Bench) -> None:
    model = Classifier(Work({2: OUT_OF_MEMORY}))
    trainer = bench.trainer(bench.callback(), data={"model": model}, auto_find_batch_size=True)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    assert raised.value is OUT_OF_MEMORY
    assert bench.only_trial().state is TrialState.INFEASIBLE
