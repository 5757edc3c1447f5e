from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.lr_scaling import (
    LrScaling,
    lr_factor,
    lr_scaling_in_words,
    rule_of,
    scale_learning_rate,
)

STEPS = 12
FACTOR = 48 / 16

# A builder takes the optimizer and k, and multiplies every absolute learning rate by k.
Builder = Callable[[Optimizer, float], Any]

BUILDERS: dict[str, Builder] = {
    "no scheduler": lambda _opt, _k: None,
    "LambdaLR": lambda opt, _k: lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda opt, _k: lr_scheduler.MultiplicativeLR(opt, lambda _epoch: 0.9),
    "StepLR": lambda opt, _k: lr_scheduler.StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt, _k: lr_scheduler.MultiStepLR(opt, milestones=[2, 7], gamma=0.5),
    "ConstantLR": lambda opt, _k: lr_scheduler.ConstantLR(opt, factor=0.25, total_iters=4),
    "LinearLR": lambda opt, _k: lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=8),
    "ExponentialLR": lambda opt, _k: lr_scheduler.ExponentialLR(opt, gamma=0.8),
    "PolynomialLR": lambda opt, _k: lr_scheduler.PolynomialLR(opt, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda opt, _k: lr_scheduler.CosineAnnealingLR(opt, T_max=5),
    "CosineAnnealingLR with eta_min": lambda opt, k: lr_scheduler.CosineAnnealingLR(opt, T_max=5, eta_min=k * 0.02),
    "CosineAnnealingWarmRestarts": lambda opt, k: lr_scheduler.CosineAnnealingWarmRestarts(
        opt, T_0=4, T_mult=2, eta_min=k * 0.02
    ),
    "CyclicLR": lambda opt, k: lr_scheduler.CyclicLR(opt, base_lr=k * 0.05, max_lr=k * 0.4, step_size_up=3),
    "OneCycleLR": lambda opt, k: lr_scheduler.OneCycleLR(opt, max_lr=[k * 0.4, k * 0.8], total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda opt, k: lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5, min_lr=k * 0.03),
    "ReduceLROnPlateau with a bound for each group": lambda opt, k: lr_scheduler.ReduceLROnPlateau(
        opt, patience=1, factor=0.5, min_lr=[k * 0.03, k * 0.04]
    ),
    "SequentialLR": lambda opt, k: lr_scheduler.SequentialLR(
        opt,
        [
            lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(opt, T_max=8, eta_min=k * 0.02),
        ],
        milestones=[4],
    ),
    "ChainedScheduler": lambda opt, _k: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(opt, factor=0.25, total_iters=4),
            lr_scheduler.ExponentialLR(opt, gamma=0.8),
        ]
    ),
    "SWALR": lambda opt, k: SWALR(opt, swa_lr=k * 0.05, anneal_epochs=6),
}


@dataclass(frozen=True)
class Schedule:
    """Optimizer and scheduler of a training with two groups, so that per-group lists differ from single values."""

    optimizer: Optimizer
    scheduler: Any

    @classmethod
    def built(cls, name: str, k: float, as_lr: Callable[[float], Any] = float) -> Schedule:
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": as_lr(k * 0.2)}]
        optimizer = SGD(groups, lr=as_lr(k * 0.1), momentum=0.9, foreach=False)
        return cls(optimizer, BUILDERS[name](optimizer, k))

    def scaled(self, factor: float) -> Schedule:
        scale_learning_rate([self.optimizer], [] if self.scheduler is None else [self.scheduler], lambda _: factor)
        return self

    def learning_rates(self) -> list[float]:
        """Return the rates of every step, as used by the optimizer and as returned by the scheduler."""
        rates = self._current()
        for _ in range(STEPS):
            self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
            rates += self._current()
        return rates

    def _current(self) -> list[float]:
        told = [] if self.scheduler is None else self.scheduler.get_last_lr()
        return [float(rate) for rate in (*(group["lr"] for group in self.optimizer.param_groups), *told)]


def double_tensor(rate: float) -> torch.Tensor:
    return torch.tensor(rate, dtype=torch.float64)


@pytest.mark.parametrize("as_lr", [float, double_tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("name", BUILDERS)
def test_scaling_equals_rebuilding_with_scaled_rates(name: str, as_lr: Callable[[float], Any]) -> None:
    scaled = Schedule.built(name, 1.0, as_lr).scaled(FACTOR).learning_rates()
    rebuilt = Schedule.built(name, FACTOR, as_lr).learning_rates()
    assert scaled == pytest.approx(rebuilt, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "no scheduler"])
def test_compared_schedules_are_not_constant(name: str) -> None:
    assert len(set(Schedule.built(name, 1.0).learning_rates())) > 2


def test_every_scheduler_of_torch_is_compared() -> None:
    shipped = {
        name
        for name, thing in vars(lr_scheduler).items()
        if isinstance(thing, type) and issubclass(thing, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert shipped - {"LRScheduler"} == {name.split()[0] for name in BUILDERS} - {"no", "SWALR"}


def test_groups_added_later_get_the_scaled_default_and_bound() -> None:
    schedule = Schedule.built("ReduceLROnPlateau", 1.0).scaled(2.0)
    schedule.optimizer.add_param_group({"params": [torch.zeros(1)]})
    for _ in range(20):
        schedule.scheduler.step(1.0)
    assert schedule.optimizer.defaults["lr"] == 0.2
    assert schedule.optimizer.param_groups[2]["lr"] == 0.06


class Wrapper:
    """Wrapper of an optimizer as in mixed-precision and distributed launchers: a new object with the same groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults


def test_optimizer_reachable_twice_is_scaled_once() -> None:
    schedule = Schedule.built("SequentialLR", 1.0)
    inner = schedule.scheduler._schedulers[1]
    optimizers: list[Any] = [schedule.optimizer, schedule.optimizer, Wrapper(schedule.optimizer)]
    scale_learning_rate(optimizers, [schedule.scheduler, inner, schedule.scheduler], lambda _: 2.0)
    assert [group["initial_lr"] for group in schedule.optimizer.param_groups] == [0.2, 0.4]
    assert schedule.optimizer.defaults["lr"] == 0.2
    assert inner.base_lrs == [0.2, 0.4]
    assert inner.eta_min == 0.04


def test_list_shared_by_two_schedulers_is_scaled_once() -> None:
    schedule = Schedule.built("SequentialLR", 1.0)
    assert schedule.scheduler._last_lr is schedule.scheduler._schedulers[0]._last_lr
    schedule.scaled(2.0)
    assert schedule.scheduler.get_last_lr() == pytest.approx([0.02, 0.04], rel=1e-12)


@pytest.mark.parametrize("takes_part_in_autograd", [False, True])
def test_tensor_rate_is_scaled_in_place_and_once_for_all_groups(takes_part_in_autograd: bool) -> None:
    rate = double_tensor(0.5).requires_grad_(takes_part_in_autograd)
    optimizer = SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=rate, foreach=False)
    scale_learning_rate([optimizer], [], lambda _: 4.0)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert (rate.item(), rate.requires_grad) == (2.0, takes_part_in_autograd)


def test_only_a_scheduler_with_unreachable_rates_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class TimmLike:
        base_values = (0.1,)

    Schedule.built("ChainedScheduler", 1.0).scaled(2.0)
    assert caplog.records == []
    scheduler: Any = TimmLike()
    scale_learning_rate([], [scheduler], lambda _: 3.0)
    [record] = caplog.records
    assert "TimmLike" in record.getMessage()
    assert "by 3" in record.getMessage()


@pytest.mark.parametrize(
    ("scaling", "batch_size", "factor"),
    [
        (LrScaling.NONE, 64, 1.0),
        (LrScaling.LINEAR, 64, 4.0),
        (LrScaling.LINEAR, 4, 0.25),
        (LrScaling.SQRT, 64, 2.0),
        (LrScaling.SQRT, 4, 0.5),
        (LrScaling.LINEAR, 16, 1.0),
        ("linear", 32, 2.0),
        ("sqrt", 144, 3.0),
        ("none", 1, 1.0),
        ("auto", 64, 4.0),
        ("auto", 4, 1.0),
    ],
)
def test_factor_of_a_batch_size_is_relative_to_the_default(
    scaling: LrScaling | str, batch_size: int, factor: float
) -> None:
    assert lr_factor(scaling, batch_size, 16, "SGD") == factor


def test_unknown_rule_is_answered_with_the_known_rules() -> None:
    with pytest.raises(ZeusBSOConfigError, match="'squared': choose one of 'none', 'linear', 'sqrt', 'auto'"):
        lr_factor("squared", 32, 16)


class OwnAdam(AdamW):
    pass


@pytest.mark.parametrize(
    ("optimizer", "rule", "name"),
    [
        *((name, "linear", name) for name in ("SGD", "sgd", "FusedSGD", "SGD8bit")),
        *((name, "sqrt", name) for name in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "LAMB", "FusedLamb")),
        *((name, "sqrt", name) for name in ("PagedAdamW8bit", "paged_adamw_8bit", "AdamW4bit", "DeepSpeedCPUAdam")),
        *((name, "none", name) for name in ("Lion", "Adafactor", "ASGD", "SignSGD", "Adagrad", "AdamWScheduleFree")),
        (SGD([torch.zeros(1)], lr=0.1), "linear", "SGD"),
        (OwnAdam([torch.zeros(1)]), "sqrt", "AdamW"),
        (SimpleNamespace(optimizer=OwnAdam([torch.zeros(1)])), "sqrt", "AdamW"),
        (SimpleNamespace(optimizer=None), "none", "SimpleNamespace"),
        (None, "none", "NoneType"),
    ],
)
def test_rule_of_auto_follows_kind_of_optimizer(optimizer: Any, rule: str, name: str) -> None:
    assert rule_of(optimizer) == (rule, name)


def test_auto_scales_each_optimizer_and_its_scheduler_by_own_rule() -> None:
    optimizers = [make([torch.zeros(1)], lr=0.1) for make in (SGD, AdamW, torch.optim.Adagrad)]
    schedulers: list[Any] = [lr_scheduler.StepLR(each, 1) for each in reversed(optimizers)]
    factors = [lr_factor("auto", 64, 16, each) for each in optimizers]
    assert factors == [4.0, 2.0, 1.0]
    scale_learning_rate(optimizers, schedulers, lambda each: lr_factor("auto", 64, 16, each))
    assert [each.param_groups[0]["lr"] for each in optimizers] == pytest.approx([0.4, 0.2, 0.1])
    assert [each.base_lrs[0] for each in schedulers] == pytest.approx([0.1, 0.2, 0.4])
    assert [lr_scaling_in_words("auto", factor, each) for factor, each in zip(factors, optimizers, strict=True)] == [
        "× 4 (linear, for SGD)",
        "× 2 (sqrt, for AdamW)",
        "unchanged (lr_scaling='auto' knows no rule for Adagrad: choose 'linear' or 'sqrt')",
    ]


@pytest.mark.parametrize(("batch_size", "default"), [(0, 16), (16, 0), (-1, 16)])
def test_batch_size_below_1_is_refused(batch_size: int, default: int) -> None:
    with pytest.raises(ZeusBSOConfigError, match="1 or more"):
        lr_factor(LrScaling.NONE, batch_size, default)
