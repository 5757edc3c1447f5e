"""Energy in the trainer's own loggers, without a server."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

import torch
from transformers import Trainer, TrainerCallback

from tests.support.hf_bench import (
    Bench,
    make_bench,  # noqa: F401 - a fixture
    use_one_thread,  # noqa: F401 - a fixture
)
from tests.support.hf_models import Classifier, quiet_trainer, val_digits
from tests.support.job_bench import (
    CountingMonitor,
)
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.huggingface import ZeusEnergyTrainerCallback

NAMES = ("zeus/epoch_time_s", "zeus/epoch_energy_j", "zeus/time_s", "zeus/energy_j")
STEPS_OF_16 = 11
EVALUATION = 100


class Work:
    """A training whose steps count one each, and whose evaluations count `EVALUATION` each.

    Args:
        error: Raised by the training batch `fails_at`.
        fails_at: Counts training batches from 1.
    """

    def __init__(self, error: BaseException | None = None, fails_at: int = 2) -> None:
        self.model = Classifier(error, fails_at)
        self.evaluations = 0
        self.monitor = CountingMonitor(lambda: len(self.model.seen_sizes) + EVALUATION * self.evaluations)

    def compute_metrics(self, _: Any) -> dict[str, float]:
        self.evaluations += 1
        return {"score": 0.0}

    def trainer(self, folder: Path, *callbacks: Any, **options: Any) -> Trainer:
        data: dict[str, Any] = {"model": self.model, "compute_metrics": self.compute_metrics}
        data |= options.pop("data", {})
        return quiet_trainer(folder, *callbacks, trainer_options=data, **options)


class Log(TrainerCallback):
    """A logger as `report_to` makes them: takes what is logged while a training runs."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_open = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.is_open = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        if any(name in logs for name in NAMES):
            assert self.is_open
            self.rows.append((state.global_step, {name: logs[name] for name in NAMES}))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.is_open = False


def rows_of(trainer: Trainer) -> list[dict[str, float]]:
    history: list[dict[str, float]] = trainer.state.log_history
    return [{name: row[name] for name in NAMES} for row in history if "zeus/energy_j" in row]


def rows(*epochs: int) -> list[dict[str, float]]:
    """What is logged of epochs that cost so much."""
    return [
        {
            "zeus/epoch_time_s": epoch,
            "zeus/epoch_energy_j": 10.0 * epoch,
            "zeus/time_s": sum(epochs[: number + 1]),
            "zeus/energy_j": 10.0 * sum(epochs[: number + 1]),
        }
        for number, epoch in enumerate(epochs)
    ]


def test_each_epoch_and_the_totals_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work, before, after = Work(), Log(), Log()
    meter = ZeusEnergyTrainerCallback(work.monitor)
    trainer = work.trainer(tmp_path, before, meter, after, num_train_epochs=2)
    with caplog.at_level(logging.INFO, logger="zeus_plugins.energy"):
        trainer.train()
    epoch = STEPS_OF_16 + EVALUATION
    assert rows_of(trainer) == rows(epoch, epoch)
    assert before.rows == after.rows == [(11, rows(epoch)[0]), (22, rows(epoch, epoch)[1])]
    assert (meter.time_s, meter.energy_j) == (2.0 * epoch, 20.0 * epoch)
    assert caplog.text.count("energy of the training: counted steps") == 1
    # Where scripts look for the summary of the training.
    assert "train_runtime" in trainer.state.log_history[-1]
    assert [row["epoch"] for row in trainer.state.log_history if "zeus/energy_j" in row] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "epoch"),
    [
        ({"eval_strategy": "no"}, STEPS_OF_16),
        ({"eval_strategy": "steps", "eval_steps": 5}, STEPS_OF_16 + 2 * EVALUATION),
        (
            {"data": {"eval_dataset": {"left": val_digits(), "right": val_digits()}}},
            STEPS_OF_16 + 2 * EVALUATION,
        ),
        ({"eval_on_start": True}, STEPS_OF_16 + 2 * EVALUATION),
    ],
    ids=["none", "within the epoch", "of two sets", "before the first step, too"],
)
def test_all_evaluations_of_an_epoch_belong_to_it(tmp_path: Path, options: dict[str, Any], epoch: int) -> None:
    # At its last step, a training is evaluated by steps once more.
    last = EVALUATION if options.get("eval_strategy") == "steps" else 0
    work = Work()
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), **options)
    trainer.train()
    assert rows_of(trainer) == rows(epoch + last)
    assert "train_runtime" in trainer.state.log_history[-1]


class CallsOff(TrainerCallback):
    """Wants no evaluation after an epoch."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        control.should_evaluate = False


def test_epochs_whose_evaluation_is_called_off_are_logged(tmp_path: Path) -> None:
    work = Work()
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), CallsOff(), num_train_epochs=2)
    trainer.train()
    assert rows_of(trainer) == rows(STEPS_OF_16, STEPS_OF_16)


def test_what_the_trainer_logs_after_an_epoch_is_still_logged(tmp_path: Path) -> None:
    work = Work()
    options = {"logging_strategy": "epoch", "eval_strategy": "no", "num_train_epochs": 2}
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), **options)
    trainer.train()
    assert [row["epoch"] for row in trainer.state.log_history if "loss" in row] == [1.0, 2.0]


@pytest.mark.parametrize("run", ["evaluate", "predict"])
def test_outside_train_nothing_is_measured(tmp_path: Path, run: str) -> None:
    work = Work()
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor))
    trainer.train()
    getattr(trainer, run)(val_digits())
    assert work.evaluations == 2
    assert len(rows_of(trainer)) == 1
    assert work.monitor.open_windows == []
    assert set(vars(trainer)) & {"_evaluate", "_save_checkpoint"} == set()


def test_an_error_leaves_no_window_open_and_the_next_training_begins_anew(tmp_path: Path) -> None:
    error = RuntimeError("the user's own")
    work = Work(error, fails_at=STEPS_OF_16 + 2)
    meter = ZeusEnergyTrainerCallback(work.monitor)
    trainer = work.trainer(tmp_path, meter, num_train_epochs=2)
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    assert raised.value is error
    assert work.monitor.open_windows == []
    epoch = STEPS_OF_16 + EVALUATION
    assert meter.time_s == epoch
    trainer.train()
    assert rows_of(trainer) == rows(epoch, epoch)


def test_a_second_training_has_totals_of_its_own(tmp_path: Path) -> None:
    work = Work()
    meter = ZeusEnergyTrainerCallback(work.monitor)
    trainer = work.trainer(tmp_path, meter)
    for _ in range(2):
        trainer.train()
        assert meter.time_s == STEPS_OF_16 + EVALUATION
        assert rows_of(trainer) == rows(STEPS_OF_16 + EVALUATION)


def test_by_default_the_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", "50")  # for a training without a GPU
    meter = ZeusEnergyTrainerCallback()
    Work().trainer(tmp_path, meter).train()
    assert meter.time_s > 0
    assert meter.energy_j == pytest.approx(50.0 * meter.time_s)


def test_a_smaller_batch_found_after_memory_ran_out_pays_for_the_attempt(tmp_path: Path) -> None:
    work = Work(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), fails_at=3)
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), auto_find_batch_size=True)
    trainer.train()
    steps = len(work.model.seen_sizes)
    assert work.model.seen_sizes[:4] == [16, 16, 16, 14]
    assert rows_of(trainer) == rows(steps + EVALUATION)


# Resuming


@pytest.mark.parametrize(
    ("saving", "checkpoint"),
    [({"save_strategy": "epoch"}, 11), ({"save_strategy": "steps", "save_steps": 7}, 14)],
    ids=["after an epoch", "within an epoch"],
)
def test_a_resumed_training_continues_its_totals(tmp_path: Path, saving: dict[str, Any], checkpoint: int) -> None:
    options = {"num_train_epochs": 3, **saving}
    first = Work(KeyboardInterrupt(), fails_at=18)
    with pytest.raises(KeyboardInterrupt):
        first.trainer(tmp_path, ZeusEnergyTrainerCallback(first.monitor), **options).train()
    second = Work()
    trainer = second.trainer(tmp_path, ZeusEnergyTrainerCallback(second.monitor), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
    # Steps that were trained again count once: what came after the checkpoint is lost.
    assert len(second.model.seen_sizes) == 3 * STEPS_OF_16 - checkpoint
    epoch = STEPS_OF_16 + EVALUATION
    assert rows_of(trainer) == rows(epoch, epoch, epoch)


def test_a_checkpoint_after_an_epoch_holds_its_row_in_plain_types(tmp_path: Path) -> None:
    work = Work()
    work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), save_strategy="epoch").train()
    state = json.loads((tmp_path / "checkpoint-11" / "trainer_state.json").read_text())
    epoch = STEPS_OF_16 + EVALUATION
    assert state["stateful_callbacks"]["zeus_energy"] == {
        "time_s": epoch,
        "energy_j": 10.0 * epoch,
        "epoch_time_s": 0.0,
        "epoch_energy_j": 0.0,
    }
    assert state["log_history"][-1]["zeus/energy_j"] == 10.0 * epoch


def test_a_checkpoint_without_totals_begins_them(tmp_path: Path) -> None:
    options = {"num_train_epochs": 2, "save_strategy": "epoch"}
    Work().trainer(tmp_path, **options).train()
    work = Work()
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))
    assert rows_of(trainer) == rows(STEPS_OF_16 + EVALUATION)


# Attaching


def test_a_trainer_that_exists_already_takes_the_callback(tmp_path: Path) -> None:
    work = Work()
    trainer = work.trainer(tmp_path)
    ZeusEnergyTrainerCallback(work.monitor).attach(trainer)
    trainer.train()
    assert rows_of(trainer) == rows(STEPS_OF_16 + EVALUATION)


def test_a_callback_added_without_attaching_says_what_to_do(tmp_path: Path) -> None:
    work = Work()
    trainer = work.trainer(tmp_path)
    trainer.add_callback(ZeusEnergyTrainerCallback(work.monitor))
    with pytest.raises(ZeusBSOOperationOrderError, match=r"callback.attach\(trainer\)"):
        trainer.train()


def test_a_removed_callback_measures_nothing(tmp_path: Path) -> None:
    work = Work()
    meter = ZeusEnergyTrainerCallback(work.monitor)
    trainer = work.trainer(tmp_path, meter)
    trainer.remove_callback(meter)
    trainer.train()
    assert rows_of(trainer) == []


def test_two_callbacks_on_one_trainer_are_refused(tmp_path: Path) -> None:
    work = Work()
    with pytest.raises(ZeusBSOConfigError, match="two ZeusEnergyTrainerCallback: keep one"):
        work.trainer(tmp_path, ZeusEnergyTrainerCallback(), ZeusEnergyTrainerCallback())


class TrainsAnother(TrainerCallback):
    """Trains with another trainer at the first step."""

    def __init__(self, other: Trainer) -> None:
        self._other = other

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            self._other.train()


def test_one_callback_in_two_trainings_at_a_time_is_refused(tmp_path: Path) -> None:
    work = Work()
    meter = ZeusEnergyTrainerCallback(work.monitor)
    trainer = work.trainer(tmp_path, meter, TrainsAnother(Work().trainer(tmp_path, meter)))
    with pytest.raises(ZeusBSOOperationOrderError, match="in a training already"):
        trainer.train()
    assert work.monitor.open_windows == []


def test_a_training_within_that_does_not_know_its_callback_is_refused(tmp_path: Path) -> None:
    work = Work()
    meter = ZeusEnergyTrainerCallback(work.monitor)
    other = Work().trainer(tmp_path)
    other.add_callback(meter)
    trainer = work.trainer(tmp_path, meter, TrainsAnother(other))
    with pytest.raises(ZeusBSOOperationOrderError, match=r"callback.attach\(trainer\)"):
        trainer.train()


def test_another_trainer_without_the_callback_is_part_of_the_epoch(tmp_path: Path) -> None:
    work, other = Work(), Work()
    trainer = work.trainer(tmp_path, ZeusEnergyTrainerCallback(work.monitor), TrainsAnother(other.trainer(tmp_path)))
    trainer.train()
    assert rows_of(trainer) == rows(STEPS_OF_16 + EVALUATION)


# With the batch size optimization


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_both_callbacks_measure_side_by_side(bench: Bench, is_first: bool) -> None:
    work = Work()
    optimizer = bench.callback(bench.job(0.0, max_epochs=2), energy_monitor=work.monitor)
    meter = ZeusEnergyTrainerCallback(work.monitor)
    callbacks = [meter, optimizer] if is_first else [optimizer, meter]
    trainer = work.trainer(bench.folder, *callbacks, num_train_epochs=2, save_strategy="epoch")
    trainer.train()
    assert work.model.seen_sizes == [48, 48, 48, 24]
    assert rows_of(trainer) == rows(4 + EVALUATION)
    assert bench.only_trial().time_s == 4.0 + EVALUATION
    state = json.loads((bench.folder / "checkpoint-4" / "trainer_state.json").read_text())
    assert {"zeus_bso", "zeus_energy"} <= set(state["stateful_callbacks"])
    assert set(vars(trainer)) & {"_evaluate", "_save_checkpoint", "get_train_dataloader", "create_scheduler"} == set()
    assert work.monitor.open_windows == []
