"""Policy `gp_voi` is never stuck for long, and ceases to try where that does not pay: whole jobs, simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bso_server.simulate.workload import Epoch
from tests.support.histories import Life, new_life, run
from tests.support.landscapes import Case, drawn, workload
from zeus_plugins.protocol import TrialState

RECURRENCES = 300


def tried_after(life: Life, size: int, needed: dict[int, int], epoch_j: dict[int, float]) -> int:
    """Trials until one of this size reaches the target."""
    for number in range(1, 101):
        trial = life.ask()
        ended = run(life, trial, needed[trial.batch_size], epoch_j[trial.batch_size])
        if trial.batch_size == size and ended.state is TrialState.COMPLETED:
            return number
    raise AssertionError(f"{size} never reached the target in 100 trials: {life.reason}")


# --- Never stuck ------------------------------------------------------------------------------------------------------


# Of each kind, the seeds that every run of the tests plays, and those that only a long run does.
SEEDS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "law": (range(2), range(2, 20)),
    "shuffled": (range(2), range(2, 20)),
    "two sizes": (range(4), range(4, 30)),
    "first run slowed": (range(2), range(2, 12)),
    "second run slowed": (range(2), range(2, 12)),
    "dip": ((1, 2), (0, *range(3, 24))),
    "drift": ((0, 1), range(2, 20)),
}
# Where the size that is played needs as many epochs as before, nothing shows that all others have changed.
NOTHING_SHOWS = {("drift", 2), ("drift", 15)}


def marks_of(kind: str, seed: int) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if seed in SEEDS[kind][1] else []
    return [*marks, pytest.mark.xfail(reason="nothing shows")] if (kind, seed) in NOTHING_SHOWS else marks


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=marks_of(kind, seed))
        for kind, seeds in SEEDS.items()
        for seed in sorted([*seeds[0], *seeds[1]])
    ],
)
def test_in_the_end_the_cheapest_size_is_played(kind: str, seed: int) -> None:
    outcomes = drawn(kind, seed).play(RECURRENCES, seed=seed)
    assert outcomes.played.unfinished == 0
    assert outcomes.missed == set()
    assert outcomes.share_of_best(50, 0.03) >= 0.75


@pytest.mark.parametrize(
    ("batch_sizes", "epochs", "epoch_j", "default", "seed"),
    [
        # 64 takes 0.8 times the cost of 512, the best one that keeps the laws.
        pytest.param(
            [8, 16, 32, 64, 128, 256, 512, 1024, 2048],
            [27, 21, 20, 8, 20, 21, 23, 26, 33],
            [151, 80, 45, 27.6, 18.7, 14.4, 12.2, 11.1, 10.5],
            16,
            21,
            marks=pytest.mark.slow,
        ),
        # 32 takes 0.62 times the cost of 64: its try is stopped after 29 of 52 epochs.
        ([32, 64], [52, 163], [1164, 587], 64, 18),
    ],
)
def test_in_the_long_run_a_size_that_breaks_every_law_is_found(
    batch_sizes: list[int], epochs: list[float], epoch_j: list[float], default: int, seed: int
) -> None:
    outcomes = Case(workload(batch_sizes, epochs, epoch_j, default, 0.08)).play(200, seed=seed)
    assert outcomes.missed == set()
    assert outcomes.share_of_best(50, 0.03) >= 0.75


def test_in_the_long_run_each_doubtful_size_is_checked_once() -> None:
    """All sizes are known to cost more in the end where the laws hold, for a few runs in all and no more of them."""
    sizes = [8, 16, 32, 64, 128, 256, 512]
    case = Case(workload(sizes, [20, 20, 20, 20, 40, 80, 160], [80, 40, 20, 10, 10, 10, 10], 64))
    outcomes = case.play(400)
    checks = [trial for trial in outcomes.played.trials if "no run has shown yet" in trial.record.reason]
    assert checks
    assert {trial.recurrence % 25 for trial in checks} == {0}
    assert checks[0].recurrence == 100
    assert len({trial.record.batch_size for trial in checks}) == len(checks)
    assert sum(trial.cost_j for trial in checks) <= 2 * len(checks) * outcomes.best_j
    assert max(outcomes.tries) < 300


@pytest.mark.parametrize(("smallest", "each", "limit"), [(4.0, 0.0, 1.1), (1.0, 1.5, 1.45)])
def test_epochs_that_cost_more_are_followed(smallest: float, each: float, limit: float) -> None:
    """All sizes alike, or the larger the more: fifteen recurrences after it, in runs of the size that is cheapest then.

    Costs that follow the middle one of eight runs alone would take 1.18 and 2.19.
    """
    ratios = []
    for seed in range(6):
        job = drawn("law", seed).workload
        dearer = []
        for place, size in enumerate(job.sizes):
            ((limit_w, epoch),) = size.epochs.items()
            dearer.append(replace(size, epochs={limit_w: Epoch(1.0, (smallest + place * each) * epoch.energy_j)}))
        outcomes = Case(job, later=replace(job, sizes=tuple(dearer)), changes_at=30).play(45, seed=seed)
        ratios.append(sum(outcomes.played.costs_j[30:]) / 15 / outcomes.best_j)
    assert sum(ratios) / len(ratios) <= limit, ratios


def test_on_a_busy_machine_a_size_is_played_that_is_nearly_the_cheapest() -> None:
    """Sizes that differ by a few percent are as good as one if the cost of a run varies by 30 %."""
    assert drawn("noise", 0).play(RECURRENCES).share_of_best(50, 0.1) >= 0.9


@pytest.mark.parametrize("factor", [0.4, 0.6, 0.75])
def test_a_size_between_two_others_along_a_trend_is_tried(factor: float) -> None:
    """Both neighbours reach the target in 20 epochs; this one needs less, which no law expects."""
    needed, epoch_j = {32: 21, 64: round(20 * factor), 128: 20}, {32: 16.0, 64: 13.0, 128: 11.0}
    life = new_life((32, 64, 128), 128)
    run(life, life.ask(), needed[128], epoch_j[128])
    run(life, life.dispatch(32), needed[32], epoch_j[32])
    assert tried_after(life, 64, needed, epoch_j) <= 40


@pytest.mark.parametrize("startup", [1.0, 3.0])
@pytest.mark.parametrize(("sizes", "default"), [((32, 64), 64), ((32, 64), 32), ((64, 512), 512), ((64, 512), 64)])
def test_a_try_that_was_stopped_after_its_first_epoch_is_repeated(
    sizes: tuple[int, int], default: int, startup: float
) -> None:
    """The other one of two sizes is cheaper by a factor of 2.35; its first try ended on a guess."""
    (other,) = {*sizes} - {default}
    needed, epoch_j = {default: 47, other: 20}, {default: 10.0, other: 10.0}
    life = new_life(sizes, default, max_epochs=150)
    run(life, life.ask(), needed[default], epoch_j[default])
    trial = life.dispatch(other)
    life.report(trial, 10.0 * startup, epoch=1, metric=0.0)
    life.move(life.trials[-1], TrialState.EARLY_STOPPED, 10.0 * startup)
    assert tried_after(life, other, needed, epoch_j) <= 80


@pytest.mark.parametrize("slowed", [1, 2])
@pytest.mark.parametrize(
    ("epochs", "epoch_j"),
    [((14, 12, 10, 14), (20, 14, 10, 9)), ((14, 12, 20, 30), (20, 14, 13, 12)), ((20,) * 4, (20, 14, 10, 8))],
)
def test_a_run_that_costs_four_times_as_much_costs_a_few_runs_at_most(
    epochs: tuple[int, ...], epoch_j: tuple[int, ...], slowed: int
) -> None:
    """In 30 recurrences, beside the three runs that it costs itself (more where it is one at a dear size)."""
    job = workload((16, 32, 64, 128), epochs, epoch_j, 64)
    usual, slow = Case(job).play(30), Case(job, slowed=(slowed,)).play(30)
    first = slow.played.trials[slowed - 1]
    itself = 0.75 * first.cost_j / slow.best_j
    assert slow.extra_runs <= usual.extra_runs + itself + 2.5
    assert slow.share_of_best(5, 0.03) == 1.0


# --- Where there is nothing to learn ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "default"), [(4, 16), (7, 8), (7, 64), (7, 512)])
def test_sizes_that_are_all_the_same_are_not_compared_for_ever(sizes: int, default: int) -> None:
    """In 100 recurrences less than a run is spent on it, all tries included, and none of these in the second half."""
    job = workload([8 * 2**number for number in range(sizes)], [20] * sizes, [10] * sizes, default)
    outcomes = Case(job).play(100)
    assert outcomes.extra_runs < 1
    assert max(outcomes.tries) < 50
    assert "chance to beat it, would not pay" in outcomes.played.trials[-1].record.reason


@pytest.mark.parametrize(("sizes", "default"), [(4, 16), (7, 8), (7, 64), (7, 512)])
def test_where_the_default_is_best_it_is_soon_all_that_is_played(sizes: int, default: int) -> None:
    """Every octave away from it takes a third more epochs."""
    batch_sizes = [8 * 2**number for number in range(sizes)]
    epochs = [20 * 1.35 ** abs(math.log2(size / default)) for size in batch_sizes]
    outcomes = Case(workload(batch_sizes, epochs, [10] * sizes, default)).play(100)
    assert outcomes.extra_runs < 4
    assert len(outcomes.tries) <= 8
    assert sum(recurrence >= 20 for recurrence in outcomes.tries) <= 4
    reason = outcomes.played.trials[-1].record.reason
    assert reason.startswith("best so far, at 20")
    assert "no other size is likely to beat it" in reason or "chance to beat it, would not pay" in reason
