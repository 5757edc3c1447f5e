"""The verdict on a job's saving: literal jobs, causes, and the control runs that it asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.verdict import LEAST_CONTROLS, Judge, Run, Share, Verdict, Word, is_control_due

DEFAULT, BEST, OTHER = 32, 256, 512


def run(size: int, cost_j: float, epochs: float = 10, wasted_j: float = 0, *, explores: bool = False) -> Run:
    return Run(size, epochs, cost_j, wasted_j, explores)


def judged(runs: Sequence[Run], best: int = BEST) -> Verdict:
    judge = Judge(DEFAULT, best)
    for each in runs:
        judge.add(each)
    return judge.verdict()


EXPLORED = [run(DEFAULT, 133), run(BEST, 52, explores=True)]


def recurring(at_default: float, at_best: float, controls: int) -> list[Run]:
    """Return runs after exploration: in each block of four, one control run."""
    wobble = [1.0, 1.03, 0.98]
    block = [run(BEST, at_best * each) for each in wobble]
    return [each for _ in range(controls) for each in (*block, run(DEFAULT, at_default))]


@pytest.mark.parametrize(
    ("at_default", "at_best", "word"),
    [(100, 60, Word.SAVES), (60, 100, Word.LOSES), (100, 100, Word.NOT_SHOWN)],
)
def test_words_of_quiet_jobs(at_default: float, at_best: float, word: Word) -> None:
    verdict = judged([*EXPLORED, *recurring(at_default, at_best, 5)])
    assert verdict.word is word
    assert verdict.now is not None
    assert verdict.now.low is not None
    assert verdict.now.low <= 1 - at_best / at_default <= verdict.now.high
    assert (verdict.cause is None) == (word is not Word.NOT_SHOWN)


def test_two_control_runs_show_nothing() -> None:
    runs = [*EXPLORED, *recurring(100, 40, 3)]
    assert judged(runs[:-1]).word is Word.NOT_SHOWN
    assert judged(runs[:-1]).cause == f"2 of at least {LEAST_CONTROLS} control runs so far"
    assert judged(runs).word is Word.SAVES


def test_exploration_is_no_evidence() -> None:
    """One slow first run of the default, which the page once called a saving of 69 %."""
    runs = [
        run(DEFAULT, 1690),
        *(run(BEST, 520, explores=True) for _ in range(3)),
        *(run(BEST, 520) for _ in range(12)),
    ]
    verdict = judged(runs)
    assert (verdict.word, verdict.now, verdict.so_far) == (Word.NOT_SHOWN, None, None)
    assert verdict.cause == "no run at the default since exploration ended"


def test_the_default_as_the_best_size_saves_nothing() -> None:
    verdict = judged([run(DEFAULT, 100)] * 10, best=DEFAULT)
    assert (verdict.word, verdict.cause) == (Word.NOT_SHOWN, "the default is the best size")


def test_causes_name_what_varies() -> None:
    costs = [60, 100, 40, 80, 100, 150]
    epochs = [
        run(BEST, cost, cost / 10) if number % 2 else run(DEFAULT, cost, cost / 10) for number, cost in enumerate(costs)
    ]
    pace = [run(BEST, cost) if number % 2 else run(DEFAULT, cost) for number, cost in enumerate(costs)]
    assert "number of epochs varies by" in (judged([*EXPLORED, *epochs]).cause or "")
    assert "cost of an epoch varies by" in (judged([*EXPLORED, *pace]).cause or "")
    assert "the difference is small: a run saves between -" in (
        judged([*EXPLORED, *recurring(100, 100, 12)]).cause or ""
    )


def test_runs_needed_are_about_those_that_it_takes() -> None:
    runs = [*EXPLORED, *recurring(100, 93, 20)]
    words = [judged(runs[:count]).word for count in range(len(runs))]
    shown = words.index(Word.SAVES)
    needed = judged(runs[: len(EXPLORED) + 8]).runs_needed
    assert needed is not None
    assert 0.4 * (shown - 10) <= needed <= 2.5 * (shown - 10)


class TestSavingSoFar:
    def test_exploration_and_control_runs_are_paid(self) -> None:
        """Ten runs at 50 J in place of 100 J save 500 J; 1,000 J of trials that were stopped are not paid back."""
        recurrences = recurring(100, 50, 4)
        cheap, dear = judged([*EXPLORED, *recurrences]), judged([run(DEFAULT, 100, wasted_j=1000), *recurrences])
        assert (cheap.word, cheap.paid_back) == (Word.SAVES, True)
        assert (dear.word, dear.paid_back) == (Word.SAVES, False)
        assert dear.now == cheap.now
        assert dear.so_far is not None
        assert dear.so_far.high < 0

    def test_literal_estimate(self) -> None:
        """Of 17 runs, 5 at the default for 100 J and 12 at the best size for 50 J: 1 - 1100 / 1700."""
        runs = [run(DEFAULT, 100), *[*[run(BEST, 50)] * 3, run(DEFAULT, 100)] * 4]
        so_far = judged(runs).so_far
        assert so_far is not None
        assert so_far.middle == pytest.approx(1 - 1100 / 1700, abs=0.01)

    def test_another_size_counts_as_the_best_size_nearby(self) -> None:
        """A completed run at a third size that cost 900 J would have cost 100 J at the default."""
        runs = [run(DEFAULT, 100), run(OTHER, 900, explores=True), *[*[run(BEST, 50)] * 3, run(DEFAULT, 100)] * 4]
        so_far = judged(runs).so_far
        assert so_far is not None
        assert so_far.middle == pytest.approx(1 - 2000 / 1800, abs=0.01)


@given(
    runs=st.lists(
        st.builds(
            Run,
            batch_size=st.sampled_from([DEFAULT, BEST, OTHER]),
            epochs=st.floats(0.01, 1e4),
            cost_j=st.floats(1e-3, 1e12),
            wasted_j=st.floats(0, 1e9),
            is_exploration=st.booleans(),
        ),
        max_size=20,
    )
)
def test_nothing_saves_more_than_everything(runs: list[Run]) -> None:
    verdict = judged(runs)
    for share in (verdict.now, verdict.so_far):
        if share is not None:
            assert (-math.inf if share.low is None else share.low) <= share.middle <= share.high <= 1


class TestControlRuns:
    def verdict(self, word: Word, controls: int, saved: float = 0.4) -> Verdict:
        return Verdict(word, Share(0.1, saved, 0.6), None, False, controls, None, None)

    def distances(self, word: Word, seed: int, first: int = 1, saved: float = 0.4) -> list[int]:
        """Return the distances of the next thirty control runs."""
        found = []
        for controls in range(first, first + 30):
            verdict = self.verdict(word, controls, saved)
            due = (since for since in range(200) if is_control_due(verdict, since, seed))
            found.append(next(due, 200) + 1)
        return found

    def test_come_early_and_irregularly_until_a_verdict_is_shown(self) -> None:
        for seed in range(20):
            distances = self.distances(Word.NOT_SHOWN, seed)
            assert set(distances) <= set(range(2, 7))
            assert len(set(distances)) > 2
            assert self.distances(Word.NOT_SHOWN, seed, first=0)[0] in (1, 2)
        assert any(a != b for a, b in pairwise(self.distances(Word.NOT_SHOWN, seed) for seed in range(5)))

    def test_cost_at_most_two_percent_of_a_shown_saving(self) -> None:
        """A control run costs what a run at the best size saves."""
        assert min(self.distances(Word.SAVES, seed=3, first=LEAST_CONTROLS)) >= 50

    def test_are_made_no_more_after_a_loss_or_far_from_the_best(self) -> None:
        assert set(self.distances(Word.LOSES, seed=1)) == {201}
        assert set(self.distances(Word.SAVES, seed=1, saved=0.7)) == {201}
