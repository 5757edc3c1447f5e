"""Schedules made for another batch size, on torch's own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from tests.support.job_bench import NEVER, NEXT_SIZE, SERVERS_SIZE
from tests.support.lightning_bench import QUIET, Bench, Classifier, make_bench, quiet_trainer, train_loader  # noqa: F401 - a fixture
from tests.support.odd_sizes import RateFromSize, TwoLayers, Unfreezing
from zeus_plugins.training.lr_scaling import ScheduleWatch, scale_learning_rate

pytestmark = QUIET


def sgd() -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_rate_of_zero_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = sgd()
    watch = ScheduleWatch(8)
    watch.check([optimizer], goes_on=True)
    optimizer.param_groups[0]["lr"] = None  # like Adafactor, which determines its rates itself
    watch.check([optimizer], goes_on=True)
    optimizer.param_groups[0]["lr"] = 0.0
    watch.check([optimizer], goes_on=False)
    assert not caplog.records
    watch.check([optimizer], goes_on=True)
    watch.check([optimizer], goes_on=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("the learning rate is 0 while the training at batch size 8 goes on")


def test_rates_reset_by_the_script_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, moved = sgd(), sgd()
    schedule = torch_schedulers.StepLR(moved, 1)
    scale_learning_rate([optimizer, moved], [schedule], lambda _: 2.0)
    watch = ScheduleWatch(8)
    watch.scaled([optimizer, moved], [schedule])
    moved.param_groups[0]["lr"] = 0.02
    watch.check([optimizer, moved], goes_on=True)
    assert not caplog.records
    optimizer.param_groups[0]["lr"] = 0.1
    watch.check([optimizer, moved], goes_on=True)
    (record,) = caplog.records
    assert "the training sets its learning rate itself, which undoes lr_scaling" in record.getMessage()


class WarmUpByHand(Classifier):
    """Warm-up as in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:  # noqa: ARG002
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 3) * 0.1


def one_cycle(optimizer: Optimizer, steps: int) -> Any:
    return torch_schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


LIGHTNING: dict[str, tuple[Callable[[], Any], str | None]] = {
    "one cycle by the trainer's estimate": (lambda: Classifier(scheduler=one_cycle), None),
    "warm-up by hand": (WarmUpByHand, "the training sets its learning rate itself"),
    "no schedule": (Classifier, None),
}


def warnings_of_schedules(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "docs/schedules.md" in record.getMessage()]


@pytest.mark.parametrize(("module", "warning"), LIGHTNING.values(), ids=LIGHTNING.keys())
def test_lightning_training_is_warned_of_an_unfit_schedule(
    bench: Bench, module: Callable[[], Any], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench.complete_first_trial(bench.job())
    callback = bench.callback(lr_scaling="linear")
    quiet_trainer(callback).fit(module(), train_loader())
    assert callback.lr_factor == NEXT_SIZE / SERVERS_SIZE
    found = warnings_of_schedules(caplog)
    assert [message.startswith(warning or "?") for message in found] == ([] if warning is None else [True])


def run_at_another_size(bench: Bench, make: Callable[[], Any], *others: Callable[[], Any], **options: Any) -> Any:
    """Train at twice the script's size, with the rates scaled linearly; return module and callback."""
    job = bench.job(NEVER, max_epochs=2, batch_sizes=(16, 32), default_batch_size=16)
    for size in (16, 32):  # the first size is the script's
        module, callback = make(), bench.callback(job, lr_scaling="linear", on_failure="stop")
        data = [] if isinstance(module, RateFromSize) else [train_loader()]
        quiet_trainer(callback, *(each() for each in others), max_epochs=2, **options).fit(module, *data)
        assert callback.trial.batch_size == size
    return module, callback


def test_module_computing_the_rate_from_the_batch_size_is_not_scaled_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    module, callback = run_at_another_size(bench, RateFromSize)
    assert set(module.seen_rates) == {0.2}
    assert callback.lr_factor == 1.0
    assert module.batch_size == 16
    assert caplog.text.count("lr_scaling is left out: the module computes its learning rate") == 1


@pytest.mark.parametrize(("rate", "scaled"), [(0.05, 0.1), (None, 0.02)], ids=["its own", "a tenth of the first"])
def test_parameter_groups_added_by_finetuning_are_scaled(
    bench: Bench, rate: float | None, scaled: float, caplog: pytest.LogCaptureFixture
) -> None:
    module, _ = run_at_another_size(bench, TwoLayers, lambda: Unfreezing(rate))
    assert module.all_rates == [[0.2], pytest.approx([0.2, scaled])]
    assert warnings_of_schedules(caplog) == []


class AddedByHand(TwoLayers):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.05})


def test_parameter_group_added_by_a_script_causes_a_warning(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    module, _ = run_at_another_size(bench, AddedByHand)
    assert module.all_rates[-1] == [0.2, 0.05]
    (warning,) = warnings_of_schedules(caplog)
    assert warning.startswith("a parameter group with the learning rate 0.05 was added after lr_scaling")
