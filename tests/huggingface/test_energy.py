"""Energy in the trainer's own loggers, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.support.frameworks import STEPS_OF_16, VALIDATION, Work, energy_rows
from tests.support.hf_bench import Bench, Run, val_digits
from tests.support.job_bench import SERVERS_SIZE
from tests.support.versions import since
from zeus_plugins.huggingface import ZeusEnergyTrainerCallback

NAMES = ("zeus/epoch_time_s", "zeus/epoch_energy_j", "zeus/time_s", "zeus/energy_j")
EPOCH = STEPS_OF_16 + VALIDATION


class Log(TrainerCallback):
    """A logger as `report_to` makes it: records the logs of a running training."""

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


def metered(bench: Bench, work: Work, *callbacks: Any, **options: Any) -> Run:
    """Return a training with an energy meter and further callbacks."""
    return bench.training(ZeusEnergyTrainerCallback(work.monitor), *callbacks, work=work, **options)


def test_all_loggers_get_each_epoch_while_training_runs(bench: Bench) -> None:
    work, before, after = Work(), Log(), Log()
    run = bench.training(before, ZeusEnergyTrainerCallback(work.monitor), after, work=work, epochs=2)
    run.train()
    first, second = energy_rows(EPOCH, EPOCH)
    assert before.rows == after.rows == [(11, first), (22, second)]
    history = run.trainer.state.log_history
    # Scripts look here for the summary of the training.
    assert "train_runtime" in history[-1]
    assert [row["epoch"] for row in history if "zeus/energy_j" in row] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "evaluations"),
    [
        ({"eval_strategy": "no"}, 0),
        # With evaluation by steps, a training is evaluated once more at its last step.
        pytest.param(
            {"validate_every": 5},
            3,
            marks=since("transformers", "5.0", "evaluation by steps leaves out the last step"),
        ),
        ({"data": {"eval_dataset": {"left": val_digits(), "right": val_digits()}}}, 2),
        ({"eval_on_start": True}, 2),
    ],
    ids=["none", "within the epoch", "of two sets", "before the first step, too"],
)
def test_all_evaluations_of_epoch_count_towards_epoch(bench: Bench, options: dict[str, Any], evaluations: int) -> None:
    run = metered(bench, Work(), **options)
    run.train()
    assert run.logged("zeus/energy_j") == energy_rows(STEPS_OF_16 + evaluations * VALIDATION)
    assert "train_runtime" in run.trainer.state.log_history[-1]


class CallsOff(TrainerCallback):
    """Cancels the evaluation after an epoch."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        control.should_evaluate = False


def test_epochs_with_cancelled_evaluation_are_logged(bench: Bench) -> None:
    run = metered(bench, Work(), CallsOff(), epochs=2)
    run.train()
    assert run.logged("zeus/energy_j") == energy_rows(STEPS_OF_16, STEPS_OF_16)


def test_logs_of_trainer_after_epoch_are_kept(bench: Bench) -> None:
    run = metered(bench, Work(), epochs=2, logging_strategy="epoch", eval_strategy="no")
    run.train()
    assert [row["epoch"] for row in run.trainer.state.log_history if "loss" in row] == [1.0, 2.0]


@pytest.mark.parametrize("outside", ["evaluate", "predict"])
def test_nothing_is_measured_outside_train(bench: Bench, outside: str) -> None:
    work = Work()
    run = metered(bench, work)
    run.train()
    getattr(run.trainer, outside)(val_digits())
    assert work.validations == 2
    assert run.logged("zeus/energy_j") == energy_rows(EPOCH)
    assert work.monitor.open_windows == []
    assert run.left_behind() == []


def test_smaller_batch_after_out_of_memory_pays_for_failed_attempt(bench: Bench) -> None:
    work = Work({3: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")})
    run = metered(bench, work, auto_find_batch_size=True)
    run.train()
    assert run.sizes[:4] == [16, 16, 16, 14]
    assert run.logged("zeus/energy_j") == energy_rows(len(run.sizes) + VALIDATION)


def test_checkpoint_after_epoch_holds_row_in_plain_types(bench: Bench) -> None:
    work = Work()
    optimizer = bench.callback(bench.job(0.0, max_epochs=2), energy_monitor=work.monitor)
    metered(bench, work, optimizer, epochs=2, save_every=0).train()
    state = json.loads((bench.checkpoint(4) / "trainer_state.json").read_text())
    time_s = 4 + VALIDATION
    assert state["stateful_callbacks"]["zeus_energy"] == {
        "time_s": time_s,
        "energy_j": 10.0 * time_s,
        "epoch_time_s": 0.0,
        "epoch_energy_j": 0.0,
    }
    assert state["stateful_callbacks"]["zeus_bso"]["trial"]["batch_size"] == SERVERS_SIZE
    assert state["log_history"][-1]["zeus/energy_j"] == 10.0 * time_s


class TrainsAnother(TrainerCallback):
    """Trains with a second trainer at the first step."""

    def __init__(self, other: Trainer) -> None:
        self._other = other

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            self._other.train()


def test_inner_training_without_callback_is_part_of_epoch(bench: Bench) -> None:
    run = metered(bench, Work(), TrainsAnother(bench.trainer()))
    run.train()
    assert run.logged("zeus/energy_j") == energy_rows(EPOCH)
