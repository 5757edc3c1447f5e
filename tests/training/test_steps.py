"""Settings and schedules that count steps, at other batch sizes than the script's own."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

from tests.support import hf_bench
from tests.support.job_bench import NEVER
from tests.support.lightning_bench import QUIET, Bench, make_bench, quiet_trainer  # noqa: F401 - a fixture
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.steps import StepScale, drive_by_samples, length_of

pytestmark = QUIET

OWN, STEPS = 64, 44  # 22 batches of 64 in an epoch of 1400 samples, for two epochs
SIZES = [8, 64, 128, 1024]


@pytest.mark.parametrize(
    ("own", "new", "batches", "steps"),
    [
        ((64, 1, 22), (128, 1, 11), "1/2", "1/2"),
        ((64, 1, 22), (1024, 1, 2), "1/11", "1/11"),
        ((64, 1, None), (128, 1, None), "1/2", "1/2"),
        ((64, 1, 0), (16, 1, 3), "4", "4"),
        ((16, 4, 88), (16, 8, 88), "1", "1/2"),
        ((16, 4, None), (16, 8, None), "1", "1/2"),
    ],
)
def test_scale_follows_batches_of_an_epoch_if_they_are_known(
    own: tuple[int, int, int | None], new: tuple[int, int, int | None], batches: str, steps: str
) -> None:
    splits = [BatchSplit(per_device, accumulation) for per_device, accumulation, _ in (own, new)]
    scale = StepScale.between(splits[0], splits[1], {splits[0]: own[2], splits[1]: new[2]})
    assert scale == StepScale(Fraction(batches), Fraction(steps))


def one_cycle(optimizer: Optimizer, length: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=length)


def sequence(optimizer: Optimizer, length: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=4), one_cycle(optimizer, length)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "one cycle": one_cycle,
    "cosine": lambda it, length: lr_scheduler.CosineAnnealingLR(it, T_max=length),
    "function": lambda it, length: lr_scheduler.LambdaLR(it, lambda step: max(0.0, 1 - step / length)),
    "warm-up and cosine": lambda it, length: get_cosine_schedule_with_warmup(it, 5, length),
    "table": lambda it, length: lr_scheduler.LambdaLR(
        it, lambda step: [1.0 / (n + 1) for n in range(length + 1)][step]
    ),
    "milestones": lambda it, length: lr_scheduler.MultiStepLR(it, [length // 3, length // 2]),
    "sequence": sequence,
}


def sgd() -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules_have_equal_lengths_if_made_for_equal_numbers_of_steps(make: Callable[..., Any]) -> None:
    first = length_of(make(sgd(), 40))
    assert first == length_of(make(sgd(), 40))
    assert first != length_of(make(sgd(), 80))
    quicker = sgd()
    quicker.param_groups[0]["lr"] = 0.3
    assert first == length_of(make(quicker, 40))


def rates_of(make: Callable[..., Any], steps: int, scale: Fraction | None = None) -> list[float]:
    """Return the rate after each step of a schedule for 40 steps, driven by samples with a scale."""
    optimizer = sgd()
    schedule = make(optimizer, 40)
    if scale is not None:
        drive_by_samples(schedule, scale, Patches())
    rates = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_driven_schedule_has_the_rates_of_the_own_size_at_the_same_samples(make: Callable[..., Any]) -> None:
    own = rates_of(make, 40)
    assert rates_of(make, 20, Fraction(1, 2)) == own[1::2]
    assert rates_of(make, 120, Fraction(3))[2::3] == own


def test_one_cycle_holds_the_last_rate_in_steps_after_the_end() -> None:
    assert rates_of(one_cycle, 30, Fraction(1, 2))[20:] == [rates_of(one_cycle, 40)[-1]] * 10


def test_driven_schedule_resumes_between_its_steps_and_is_restored() -> None:
    patches, optimizer = Patches(), sgd()
    schedule = one_cycle(optimizer, 40)
    optimizer.step()
    drive_by_samples(schedule, Fraction(3), patches)
    for _ in range(4):
        schedule.step()
    state = copy.deepcopy(schedule.state_dict())
    again = one_cycle(sgd(), 40)
    drive_by_samples(again, Fraction(3), Patches())
    again.load_state_dict(state)
    again.step()
    assert again.last_epoch == 1
    again.step()
    assert again.last_epoch == 2
    patches.undo()
    assert type(schedule) is lr_scheduler.OneCycleLR
    assert "zeus_steps" not in schedule.state_dict()


# Whole trainings with settings and a schedule for the own size.


def samples() -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(1400, 4)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class OneCycle(pl.LightningModule):
    """A model with batch normalisation, and a schedule of `STEPS` steps."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.validated: list[int] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_acc", (self.network(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    def schedule(self, optimizer: Optimizer) -> Any:
        return one_cycle(optimizer, STEPS)


class AsLongAsTraining(OneCycle):
    def schedule(self, optimizer: Optimizer) -> Any:
        return one_cycle(optimizer, int(self.trainer.estimated_stepping_batches))


def job_at(bench: Any, size: int) -> Any:
    """Return a job whose next trial has this size."""
    terms: dict[str, Any] = {"max_epochs": 2, "beta_knob": None, "default_batch_size": OWN}
    job = bench.job(NEVER, batch_sizes=sorted({OWN, size}), **terms)
    if size != OWN:
        bench.complete_first_trial(job)
    return job


@pytest.mark.parametrize("size", SIZES)
def test_lightning_settings_and_schedule_of_own_size_work_at_each_size(
    bench: Bench, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=20, save_top_k=-1)
    module, callback = OneCycle(), bench.callback(job_at(bench, size), "val_acc", on_failure="stop")
    trainer = quiet_trainer(callback, saver, max_epochs=2, val_check_interval=20, enable_checkpointing=True)
    data = samples()
    trainer.fit(module, DataLoader(data, batch_size=OWN), DataLoader(data, batch_size=700))
    assert callback.trial.batch_size == size
    steps = 2 * -(-1400 // size)
    assert trainer.global_step == steps
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    interval = max(1, 20 * (steps // 2) // 22)
    assert module.validated == [
        step for step in range(1, steps + 1) if (step - 1) % (steps // 2) + 1 in range(interval, steps + 1, interval)
    ]
    assert len(list(tmp_path.glob("*.ckpt"))) == steps // interval
    assert (trainer.val_check_interval, saver._every_n_train_steps) == (20, 20)
    told = [text for text in caplog.messages if "steps of your own size" in text]
    expected = [f"val_check_interval 20 → {interval}", f"every_n_train_steps 20 → {interval}"]
    assert all(any(each in text for text in told) for each in expected) is (size != OWN)


def test_lightning_schedule_as_long_as_the_training_is_left_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    module, callback = AsLongAsTraining(), bench.callback(job_at(bench, 1024), "val_acc", on_failure="stop")
    trainer = quiet_trainer(callback, max_epochs=2)
    trainer.fit(module, DataLoader(samples(), batch_size=OWN), DataLoader(samples(), batch_size=700))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == trainer.global_step == 4
    assert "OneCycleLR" not in caplog.text


def test_unchanged_steps_keep_their_numbers(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    callback = bench.callback(job_at(bench, 128), "val_acc", on_failure="stop", steps="unchanged")
    trainer = quiet_trainer(callback, max_epochs=2)
    trainer.fit(OneCycle(), DataLoader(samples(), batch_size=OWN), DataLoader(samples(), batch_size=700))
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS // 2
    assert "steps of your own size" not in caplog.text


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("size", SIZES)
def test_transformers_settings_and_schedule_of_own_size_work_at_each_size(
    shared_server: Any, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = hf_bench.Bench(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path)
    model = Normalised()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = one_cycle(optimizer, STEPS)
    callback, watch = bench.callback(job_at(bench, size), on_failure="stop"), hf_bench.Watch()
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 20, "save_strategy": "steps", "save_steps": 20}
    settings |= {"logging_strategy": "steps", "logging_steps": 20, "eval_delay": 10}
    data = {"model": model, "optimizers": (optimizer, schedule), "train_dataset": hf_bench.Digits(0, 1400)}
    trainer = bench.trainer(callback, watch, data=data, per_device_train_batch_size=OWN, num_train_epochs=2, **settings)
    trainer.train()
    steps = 2 * -(-1400 // size)
    assert trainer.state.global_step == steps
    assert schedule.last_epoch == STEPS
    assert type(schedule) is lr_scheduler.OneCycleLR
    interval = max(1, 20 * (steps // 2) // 22)
    saved = {int(path.name.split("-")[1]) for path in Path(trainer.args.output_dir).glob("checkpoint-*")}
    assert set(range(interval, steps + 1, interval)) <= saved
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[0] == interval
    assert (trainer.args.eval_steps, trainer.args.save_steps, trainer.args.eval_delay) == (20, 20, 10)
    printed = capsys.readouterr().err
    assert (f"eval_steps 20 → {interval}" in printed) is (size != OWN)
    assert ("OneCycleLR by" in printed) is (size != OWN)


def test_transformers_length_of_training_and_warm_up_follow_samples(shared_server: Any, tmp_path: Path) -> None:
    bench = hf_bench.Bench(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path)
    callback = bench.callback(job_at(bench, 256), on_failure="stop")
    trainer = bench.trainer(
        callback,
        data={"train_dataset": hf_bench.Digits(0, 1400)},
        per_device_train_batch_size=OWN,
        max_steps=STEPS,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
    )
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 12
    assert callback.trial.epoch == 2
    assert (trainer.args.max_steps, trainer.args.warmup_steps) == (STEPS, 20)
