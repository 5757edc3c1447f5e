"""The combinations, and the training of one of them on this rank."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler
from transformers import TrainerCallback

from tests.support import hf_bench, odd_sizes
from tests.support import lightning_bench as models
from tests.support.job_bench import seconds_and_joules
from tests.support.lightning_bench import Classifier, digits, train_loader
from tests.sweep.counting import StepSizes
from zeus_plugins import JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import ZEUS
from zeus_plugins.training.session import TrialSession

SIZE = 48
EPOCHS = 2
CAP = 12  # of the samples on one device, in combinations with a cap


@dataclass(frozen=True)
class Case:
    """A combination.

    Attributes:
        framework: ``lightning`` or ``transformers``.
        source: The key of its data.
        accumulation: ``1``, ``2`` set by the user, or ``cap``: the device's limit makes the callback accumulate.
        schedule: The key of its learning rate schedule.
    """

    framework: str
    source: str
    accumulation: str
    schedule: str


@dataclass(frozen=True)
class Outcome:
    """Outcome of a combination on this rank.

    Attributes:
        steps: Samples of each optimizer step, by epoch.
        reported: Reported epochs.
        refusal: The error that refused the training, if one did.
        wrong: Steps or rates that differ from the script.
    """

    steps: list[list[int]]
    reported: float | None
    refusal: str | None
    wrong: str | None = None


def weighted() -> Any:
    return DataLoader(digits()[0], batch_size=16, sampler=WeightedRandomSampler([1.0] * 168, 168))


def stacked(items: list[Any]) -> Any:
    return [torch.stack(part) for part in zip(*items, strict=True)]


def dropping() -> Any:
    return DataLoader(digits()[0], batch_size=16, drop_last=True, shuffle=True)


LIGHTNING: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    **models.WAYS,
    "loader that drops the rest": lambda: (Classifier(), {"train_dataloaders": dropping()}),
    "weighted sampler": lambda: (Classifier(), {"train_dataloaders": weighted()}),
    "accumulated by hand": lambda: (odd_sizes.ByHand(), {"train_dataloaders": train_loader()}),
    "steps left out": lambda: (odd_sizes.EveryOther(), {"train_dataloaders": train_loader()}),
    "buckets made before": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(digits()[0], batch_sampler=odd_sizes.Buckets())},
    ),
    "size read once": lambda: (Classifier(), {"train_dataloaders": odd_sizes.ReadOnce()}),
    "little data": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(Subset(digits()[0], range(10)), batch_size=16)},
    ),
    "fixed batches": lambda: (Classifier(), {"train_dataloaders": models.list_of_batches()}),
    "length computed once": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(digits()[0], batch_sampler=odd_sizes.FixedLength())},
    ),
    "sampler made for the size": lambda: (Classifier(), {"datamodule": odd_sizes.FixedLengthData()}),
    "items that are batches": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(odd_sizes.BatchItems(), batch_size=1, collate_fn=odd_sizes.first_of)},
    ),
    "items collated as a user does": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(digits()[0], batch_size=16, collate_fn=stacked)},
    ),
    "little data and drop_last": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(Subset(digits()[0], range(40)), batch_size=16, drop_last=True)},
    ),
    "validations within epochs": lambda: (Classifier(), {"train_dataloaders": train_loader()}),
    "stream that restarts": lambda: (Classifier(), {"train_dataloaders": models.stream_loader()}),
    "accumulation by schedule": lambda: (Classifier(), {"train_dataloaders": train_loader()}),
    "rate from the size": lambda: (odd_sizes.RateFromSize(), {}),
    "late parameter groups": lambda: (odd_sizes.TwoLayers(), {"train_dataloaders": train_loader()}),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "validations within epochs": lambda: {"val_check_interval": 2},
    "stream that restarts": lambda: {"max_epochs": -1, "max_steps": 8},
    "accumulation by schedule": lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "late parameter groups": lambda: {"callbacks": [odd_sizes.Unfreezing(0.1)]},
}
# Trainings that the script ends after this number of steps.
STEPS = {("lightning", "stream that restarts"): 8, ("transformers", "stream that restarts"): 12}
STEPS |= {("transformers", "a fraction of epochs"): 6}
# The rates of the parameter groups, at twice the default size.
RATES: dict[str, Callable[[Any], float]] = {
    "rate from the size": lambda module: 0.1 * module.batch_size / 16,
    "late parameter groups": lambda _: 0.2,
}
# Data that Lightning can rebuild for several devices.
ON_TWO = (
    "datamodule.batch_size",
    "datamodule.hparams",
    "hard-coded in the datamodule",
    "built once in setup",
    "module.batch_size",
    "loader",
    "loader that drops the rest",
    "stream",
    "little data",
)
# With manual optimization Lightning steps no scheduler, and of data without a length it estimates none.
UNSCHEDULED = {"stream", "size read once", "manual optimization", "accumulated by hand", "stream that restarts"}
# The other trainings have their own scheduler, or are refused with any scheduler.
UNSCHEDULED |= {"length computed once", "items that are batches", "accumulation by schedule", *RATES}

STREAM: dict[str, Any] = {"trainer_options": {"train_dataset": hf_bench.Stream()}, "max_steps": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loader in a subclass": {"kind": hf_bench.HardCodedTrainer},
    "prepared loader in a subclass": {"kind": hf_bench.PreparedTrainer},
    "loader built once": {"kind": hf_bench.BuiltOnceTrainer},
    "stream": STREAM,
    "stream in shares": STREAM | {"accelerator_config": {"dispatch_batches": False}},
    "stream in split shares": STREAM | {"accelerator_config": {"dispatch_batches": False, "split_batches": True}},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "split_batches of a prepared loader": {
        "kind": hf_bench.PreparedTrainer,
        "accelerator_config": {"split_batches": True},
    },
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "dispatch_batches and split_batches": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
    "drop_last": {"dataloader_drop_last": True, "per_device_eval_batch_size": 4},
    "little data": {"trainer_options": {"train_dataset": hf_bench.Digits(length=10)}},
    "little data and drop_last": {
        "trainer_options": {"train_dataset": hf_bench.Digits(length=40)},
        "dataloader_drop_last": True,
    },
    "length computed once": {"kind": hf_bench.FixedLengthTrainer},
    "items that are batches": {
        "trainer_options": {"train_dataset": hf_bench.BatchItems(), "data_collator": odd_sizes.first_of}
    },
    "stream that restarts": {"trainer_options": {"train_dataset": hf_bench.Stream()}, "max_steps": 12},
    "a fraction of epochs": {"num_train_epochs": 1.5},
}

ACCUMULATION = ("1", "2", "cap")
SCHEDULES: dict[str, Callable[[Any, int], Any] | None] = {
    "none": None,
    "one cycle": lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
}


def cases(world_size: int) -> Iterator[Case]:
    """Yield each source of this number of processes with each accumulation, and with the schedules in turn."""
    sources = LIGHTNING if world_size == 1 else ON_TWO
    schedules = [*SCHEDULES, *SCHEDULES]
    for first, source in enumerate(sources):
        for turn, accumulation in enumerate(ACCUMULATION, first % len(SCHEDULES)):
            yield Case("lightning", source, accumulation, "none" if source in UNSCHEDULED else schedules[turn])
    for first, source in enumerate(TRANSFORMERS):
        for turn, accumulation in enumerate(ACCUMULATION, first):
            yield Case("transformers", source, accumulation, ("linear", "own")[turn % 2])


def complete_first_trial(job: JobSpec, server_url: str) -> None:
    """Complete the first trial without a training, at the default size, so that the next trial has the other size."""
    with client_from_environment(server_url) as client:
        session = TrialSession(job, client, seconds_and_joules(1.0, 10.0))
        session.ask()
        session.begin_measurement()
        session.report_evaluation(job.target_metric or 0.0, 1)
        session.end()


def outcome_of(case: Case, folder: Path) -> Outcome:
    """Train the combination on this rank."""
    options: dict[str, Any] = {
        "server_url": f"embedded:///{folder}/sweep.sqlite3",
        "energy_monitor": seconds_and_joules(1.0, 10.0),
        "on_failure": "stop",
    }
    if case.accumulation == "cap":
        options["max_per_device_batch_size"] = CAP
    job_id = "-".join((case.framework, case.source, case.accumulation, case.schedule)).replace(" ", "_")
    job = JobSpec(
        job_id=job_id,
        job_id_prefix=case.framework,
        batch_sizes=(24, SIZE),
        default_batch_size=SIZE,
        target_metric=2.0,
        higher_is_better_metric=True,
        max_epochs=EPOCHS,
    )
    if case.source in RATES:
        options["lr_scaling"] = "linear"
        job = job.model_copy(update={"default_batch_size": SIZE // 2, "policy": ZEUS})
        complete_first_trial(job, options["server_url"])
    train = _fit if case.framework == "lightning" else _train
    return train(case, job, options)


class _Observer(Callback):
    def __init__(self, sizes: StepSizes, rate: Callable[[Any], float] | None) -> None:
        self._sizes = sizes
        self._rate = rate
        self.wrong_rates: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._sizes.watch(trainer.optimizers)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups] if self._rate else []
        self.wrong_rates += [rate for rate in rates if self._rate and not math.isclose(rate, self._rate(pl_module))]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._sizes.begin_epoch()


def _fit(case: Case, job: JobSpec, options: dict[str, Any]) -> Outcome:
    module, data = LIGHTNING[case.source]()
    module._scheduler = SCHEDULES[case.schedule]
    sizes, callback = StepSizes(module.network), ZeusBSOCallback(job, "score", **options)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    own = {"accumulate_grad_batches": 2} if case.accumulation == "2" and module.automatic_optimization else {}
    strategy = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    observer = _Observer(sizes, RATES.get(case.source))
    given = OPTIONS.get(case.source, dict)()
    callbacks = [callback, *given.pop("callbacks", []), observer]
    trainer = models.quiet_trainer(*callbacks, **{"max_epochs": EPOCHS, **own, **strategy, **given})
    refusal = None
    try:
        trainer.fit(module, **data)
    except ZeusBSOConfigError as error:
        refusal = str(error)
    wrong = f"rates {observer.wrong_rates}" if observer.wrong_rates else _wrong_steps(case, trainer.global_step)
    return Outcome(sizes.epochs, callback.trial.epoch if callback.has_trial else None, refusal, wrong)


def _wrong_steps(case: Case, steps: int) -> str | None:
    said = STEPS.get((case.framework, case.source), steps)
    if case.source == "stream that restarts":  # it has the samples of its steps at the script's own size
        own = hf_bench.USERS_SIZE * int(os.environ.get("WORLD_SIZE", "1")) * (2 if case.accumulation == "2" else 1)
        said = -(-said * own // SIZE)
    return None if steps == said else f"{steps} of {said} steps"


class _HuggingFaceObserver(TrainerCallback):
    def __init__(self, sizes: StepSizes) -> None:
        self._sizes = sizes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._sizes.watch([kwargs["optimizer"]])

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._sizes.begin_epoch()


def _train(case: Case, job: JobSpec, options: dict[str, Any]) -> Outcome:
    model = hf_bench.Classifier()
    sizes, callback = StepSizes(model.network), ZeusBSOTrainerCallback(job, "score", **options)
    given = dict(TRANSFORMERS[case.source])
    trainer_options = {"model": model} | given.pop("trainer_options", {})
    if case.schedule == "own":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer_options["optimizers"] = (optimizer, LambdaLR(optimizer, lambda step: 0.9**step))
    if case.accumulation == "2":
        given["gradient_accumulation_steps"] = 2
    refusal = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf_bench.quiet_trainer(
            Path(folder),
            callback,
            _HuggingFaceObserver(sizes),
            trainer_options=trainer_options,
            **{"num_train_epochs": EPOCHS} | given,
        )
        try:
            trainer.train()
        except ZeusBSOConfigError as error:
            refusal = str(error)
    has_trial = callback._run.trial is not None
    wrong = _wrong_steps(case, trainer.state.global_step)
    return Outcome(sizes.epochs, callback.trial.epoch if has_trial else None, refusal, wrong)
