"""Benchmark of verdicts on savings against the truth."""

from __future__ import annotations

import pytest

from benchmarks.honesty import EQUAL, LOOKS, SAVING, Played, World, main, measure, play
from zeus_plugins.protocol import CONTROLS, SavingsWord


def test_figures_of_literal_jobs_are_exact() -> None:
    def played(word: SavingsWord, first: int, *, covers: bool) -> Played:
        """Return a job that shows `word` from look `first` on."""
        words = (*[SavingsWord.NOT_SHOWN] * (first - 1), *[word] * (101 - first))
        costs = tuple(number / 1000 for number in range(1, 101))
        return Played(words, (covers,) * 100, (True,) * 100, wrongly_paid_back=not covers, control_costs=costs)

    jobs = [played(SavingsWord.SAVES, 15, covers=True), played(SavingsWord.LOSES, 50, covers=False)]
    saving, equal = (measure(World("any", saving=share), jobs) for share in (0.3, 0.0))
    assert LOOKS == (10, 20, 30, 50, 100)
    assert (saving.wrong_ever, saving.wrong_at) == (0.5, (0, 0, 0, 0.5, 0.5))
    assert saving.right_by == (0, 0.5, 0.5, 0.5, 0.5)
    assert (equal.wrong_ever, equal.wrong_at) == (1.0, (0, 0.5, 0.5, 1.0, 1.0))
    assert (saving.covered_now, saving.covered_so_far) == ((0.5,) * 5, (1.0,) * 5)
    assert saving.wrongly_paid_back == 0.5
    assert saving.control_cost == pytest.approx((0.01, 0.02, 0.03, 0.05, 0.1))


def test_table_has_a_line_per_chosen_kind_of_job(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [EQUAL[0].name, SAVING[0].name]
    assert main(["--seeds", "1", "--only", *chosen]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [
        name for name in (each.name for each in (*EQUAL, *SAVING)) if any(f" {name}  " in line for line in lines)
    ] == chosen


@pytest.mark.slow
def test_verdicts_hold_in_forty_jobs() -> None:
    """Check the goals with three standard errors: at most 10 % wrong, 70 and 97 % right after runs 30 and 50."""
    equal, saving = (
        measure(world, [play(world, CONTROLS, seed) for seed in range(40)])
        for world in (World("equal, noise 20 %"), World("30%, noise 20 %", saving=0.3))
    )
    assert equal.wrong_ever <= 0.24
    assert saving.right_by[2] >= 0.48
    assert saving.right_by[3] >= 0.89
    assert min(saving.covered_now) >= 0.75
