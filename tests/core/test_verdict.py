"""Verdict on a job's saving: literal jobs, causes, and the control runs that the verdict requires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core import verdict as verdict_module
from bso_server.core.effect import Effect
from bso_server.core.job import InMemoryJob
from bso_server.core.model import Arm, EpochBound, History, Report, Statistics, Suggestion, TrialRecord
from bso_server.core.verdict import LEAST_CONTROLS, Judge, Run, Verdict, is_control_due, with_control
from tests.support.histories import make_job
from zeus_plugins.protocol import GP_VOI, ZEUS, CreatedJob, Ending, EndReason, Origin, SavingsWord, TrialState

DEFAULT, BEST, OTHER = 32, 256, 512


def run(size: int, cost_j: float, epochs: float = 10, *, explores: bool = False) -> Run:
    return Run(size, epochs, cost_j, explores)


def judged(runs: Sequence[Run], best: int = BEST, wasted_j: float = 0.0) -> Verdict:
    judge = Judge(DEFAULT, best)
    judge.learn(runs)
    return judge.verdict(wasted_j)


EXPLORED = [run(DEFAULT, 133), run(BEST, 52, explores=True)]


def recurring(at_default: float, at_best: float, controls: int) -> list[Run]:
    """Return runs after exploration, with one control run per block of four."""
    wobble = [1.0, 1.03, 0.98]
    block = [run(BEST, at_best * each) for each in wobble]
    return [each for _ in range(controls) for each in (*block, run(DEFAULT, at_default))]


@pytest.mark.parametrize(
    ("at_default", "at_best", "word"),
    [(100, 60, SavingsWord.SAVES), (60, 100, SavingsWord.LOSES), (100, 100, SavingsWord.NOT_SHOWN)],
)
def test_quiet_jobs_get_the_expected_words(at_default: float, at_best: float, word: SavingsWord) -> None:
    verdict = judged([*EXPLORED, *recurring(at_default, at_best, 5)])
    assert verdict.word is word
    assert verdict.now is not None
    assert verdict.now.low is not None
    assert verdict.now.low <= 1 - at_best / at_default <= verdict.now.high
    assert (verdict.cause is None) == (word is not SavingsWord.NOT_SHOWN)


def test_two_control_runs_show_nothing() -> None:
    runs = [*EXPLORED, *recurring(100, 40, 3)]
    assert judged(runs[:-1]).word is SavingsWord.NOT_SHOWN
    assert judged(runs[:-1]).cause == f"2 of at least {LEAST_CONTROLS} control runs so far"
    assert judged(runs).word is SavingsWord.SAVES


def test_runs_on_a_busy_machine_are_compared_only_among_themselves() -> None:
    quiet = [*EXPLORED, *recurring(100, 60, 5)]
    # Other work has slowed the runs at the best size and hides their saving.
    slowed = [
        replace(each, amount=3 * each.amount, is_busy=True) if each.batch_size == BEST else each for each in quiet
    ]
    unmarked = [replace(each, is_busy=False) for each in slowed]
    words = [judged(runs).word for runs in (quiet, slowed, unmarked)]
    assert words == [SavingsWord.SAVES, SavingsWord.NOT_SHOWN, SavingsWord.LOSES]
    assert judged(slowed).cause == "15 of 20 runs were on a busy machine"
    assert judged(slowed).controls == judged(quiet).controls == 5
    # The pace is unknown, so that no saving can be stated.
    assert (judged(slowed).now, judged(slowed).so_far) == (None, None)
    # Fewer epochs without a known pace decide nothing.
    fewer = [replace(each, epochs=each.epochs / 4) if each.batch_size == BEST else each for each in slowed]
    assert judged(fewer).word is SavingsWord.NOT_SHOWN
    all_slowed = [replace(each, amount=3 * each.amount, is_busy=True) for each in [*EXPLORED, *recurring(100, 60, 12)]]
    assert judged(all_slowed).word is SavingsWord.SAVES


@pytest.mark.parametrize(("ratio", "word"), [(40, SavingsWord.SAVES), (1 / 40, SavingsWord.LOSES)])
def test_great_difference_is_shown(ratio: float, word: SavingsWord) -> None:
    """Beyond the grid of effects, each density is too small for a float."""
    block = [run(BEST, 100, 10), run(DEFAULT, 100 * ratio, 10 * ratio)]
    assert judged([*EXPLORED, *block * 120]).word is word


def test_nothing_is_paid_back_before_a_verdict() -> None:
    """Two control runs at twice the cost are no verdict, and therefore no amount."""
    verdict = judged(
        [run(DEFAULT, 100), *[run(BEST, 50)] * 4, run(DEFAULT, 104), *[run(BEST, 51)] * 4, run(DEFAULT, 99)]
    )
    assert verdict.so_far is not None
    assert verdict.so_far.low is not None
    assert verdict.so_far.low > 0
    assert (verdict.word, verdict.is_paid_back) == (SavingsWord.NOT_SHOWN, False)


def test_exploration_is_no_evidence() -> None:
    """One slow first run of the default, which an early version of the page called a saving of 69 %."""
    runs = [
        run(DEFAULT, 1690),
        *(run(BEST, 520, explores=True) for _ in range(3)),
        *(run(BEST, 520) for _ in range(12)),
    ]
    verdict = judged(runs)
    assert (verdict.word, verdict.now, verdict.so_far) == (SavingsWord.NOT_SHOWN, None, None)
    assert verdict.cause == "no control run at 32 yet"


def test_default_as_the_best_size_saves_nothing() -> None:
    verdict = judged([run(DEFAULT, 100)] * 10, best=DEFAULT)
    assert (verdict.word, verdict.cause) == (SavingsWord.NOT_SHOWN, None)


def test_cause_names_the_varying_quantity() -> None:
    costs = [60, 100, 40, 80, 100, 150]
    epochs = [
        run(BEST, cost, cost / 10) if number % 2 else run(DEFAULT, cost, cost / 10) for number, cost in enumerate(costs)
    ]
    noisy = [60, 100, 140, 80, 70, 150, 55, 120, 90, 65, 145, 75, 130, 60, 110, 85]
    pace = [run(BEST, cost) if number % 2 else run(DEFAULT, cost) for number, cost in enumerate(noisy)]
    assert "number of epochs varies by" in (judged([*EXPLORED, *epochs]).cause or "")
    assert "cost of an epoch varies by" in (judged([*EXPLORED, *pace]).cause or "")
    paces = [1.0, 1.9, 3.6, 2.0, 1.1, 2.1, 4.0, 7.5, 4.1, 2.2, 1.2, 0.6, 1.3, 2.4]
    drifting = [run(DEFAULT if n % 4 == 3 else BEST, (100 if n % 4 == 3 else 80) * p) for n, p in enumerate(paces)]
    assert "the machine's pace drifts: the cost of an epoch changes by" in (judged([*EXPLORED, *drifting]).cause or "")
    assert "the difference is small: a run saves between -" in (
        judged([*EXPLORED, *recurring(100, 100, 12)]).cause or ""
    )


def test_runs_needed_estimates_the_runs_until_the_verdict() -> None:
    runs = [*EXPLORED, *recurring(100, 93, 20)]
    words = [judged(runs[:count]).word for count in range(len(runs))]
    shown = words.index(SavingsWord.SAVES)
    needed = judged(runs[: len(EXPLORED) + 8]).runs_needed
    assert needed is not None
    assert 0.4 * (shown - 10) <= needed <= 3 * (shown - 10)


class TestSavingSoFar:
    def test_exploration_and_control_runs_are_charged(self) -> None:
        """Ten runs at 50 J instead of 100 J save 500 J; 1,000 J of stopped trials are not paid back."""
        recurrences = recurring(100, 50, 4)
        runs = [*EXPLORED, *recurrences]
        cheap, dear = judged(runs), judged(runs, wasted_j=1000)
        assert (cheap.word, cheap.is_paid_back) == (SavingsWord.SAVES, True)
        assert (dear.word, dear.is_paid_back) == (SavingsWord.SAVES, False)
        assert dear.now == cheap.now
        assert dear.so_far is not None
        assert dear.so_far.high < 0

    def test_estimate_matches_a_literal_job(self) -> None:
        """Expect 1 - 1100 / 1700 for 17 runs: 5 at the default for 100 J and 12 at the best size for 50 J."""
        runs = [run(DEFAULT, 100), *[*[run(BEST, 50)] * 3, run(DEFAULT, 100)] * 4]
        so_far = judged(runs).so_far
        assert so_far is not None
        assert so_far.middle == pytest.approx(1 - 1100 / 1700, abs=0.01)

    def test_third_size_counts_as_the_best_size_nearby(self) -> None:
        """Charge a completed 900 J run at a third size against 100 J at the default."""
        runs = [run(DEFAULT, 100), run(OTHER, 900, explores=True), *[*[run(BEST, 50)] * 3, run(DEFAULT, 100)] * 4]
        so_far = judged(runs).so_far
        assert so_far is not None
        assert so_far.middle == pytest.approx(1 - 2000 / 1800, abs=0.01)


@given(
    runs=st.lists(
        st.builds(
            Run,
            batch_size=st.sampled_from([DEFAULT, BEST, OTHER]),
            epochs=st.floats(0, 1e4),
            amount=st.floats(0, 1e12),
            is_exploration=st.booleans(),
        ),
        max_size=20,
    ),
    wasted_j=st.floats(0, 1e9),
)
def test_no_saving_exceeds_everything(runs: list[Run], wasted_j: float) -> None:
    verdict = judged(runs, wasted_j=wasted_j)
    for share in (verdict.now, verdict.so_far):
        if share is not None:
            assert (-math.inf if share.low is None else share.low) <= share.middle <= share.high <= 1


def test_runs_learned_singly_or_together_give_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "_LEARNED", 10)
    runs = [*EXPLORED, *recurring(100, 60, 10)]
    one_by_one = Judge(DEFAULT, BEST)
    for count, each in enumerate(runs, start=1):
        one_by_one.learn([each])
        assert one_by_one.verdict() == judged(runs[:count])
    # Of 42 runs, the latest 12 are evidence: three control runs.
    assert one_by_one.controls == 3


def test_run_without_measured_energy_is_no_evidence() -> None:
    runs = [*EXPLORED, *recurring(100, 50, 4)]
    verdict = judged([*runs, run(BEST, 0), run(DEFAULT, 0)])
    assert verdict.controls == judged(runs).controls


class FakeJudge(Judge):
    """A judge with a given word, number of control runs, and saving."""

    def __init__(self, word: SavingsWord, controls: int, saved: float = 0.4) -> None:
        super().__init__(DEFAULT, BEST)
        self._word, self._controls, self._saved = word, controls, saved

    def now(self) -> tuple[SavingsWord, Effect | None]:
        return self._word, Effect(0.1, -math.log1p(-self._saved), 3.0)


class TestControlRuns:
    job = make_job((DEFAULT, BEST), DEFAULT, policy=GP_VOI)

    def places(self, word: SavingsWord, seed: int, made: int = 1, saved: float = 0.4, **fields: object) -> list[int]:
        """Return the places among 1,000 trials where a control run is due."""
        job = self.job.model_copy(update={"mab_seed": seed, **fields})
        judge = FakeJudge(word, made, saved)
        return [number for number in range(1000) if is_control_due(job, judge, number)]

    def test_control_runs_come_early_and_irregularly_until_a_verdict(self) -> None:
        for seed in range(20):
            places = self.places(SavingsWord.NOT_SHOWN, seed)
            assert [place // 4 for place in places] == list(range(250))
            assert {place % 4 for place in places} == {0, 1, 2, 3}
            first = self.places(SavingsWord.NOT_SHOWN, seed, made=0)
            assert [place // 2 for place in first] == list(range(500))
        assert any(a != b for a, b in pairwise(self.places(SavingsWord.NOT_SHOWN, seed) for seed in range(5)))

    def test_control_runs_cost_less_than_two_percent_of_a_shown_saving(self) -> None:
        """The cost of a control run is the saving of a run at the best size."""
        assert len(self.places(SavingsWord.SAVES, seed=3, made=LEAST_CONTROLS)) in (16, 17)

    def test_control_runs_cease_after_a_loss_or_far_from_the_best_size(self) -> None:
        assert self.places(SavingsWord.LOSES, seed=1) == []
        assert self.places(SavingsWord.SAVES, seed=1, saved=0.7) == []

    def test_control_runs_follow_the_share_set_by_the_job(self) -> None:
        for share in (0.1, 0.4):
            assert len(self.places(SavingsWord.LOSES, seed=1, controls=share)) == pytest.approx(1000 * share, abs=40)

    def chosen(
        self, job: CreatedJob, suggestion: Suggestion, in_flight: tuple[TrialRecord, ...] = (), **arm: object
    ) -> set[Suggestion]:
        """Return the suggestions that replace the given suggestion after two to nine trials."""
        found = set()
        for trials in range(1, 9):
            arms = {size: Arm(size, trials=1, completed=Statistics.of([100.0]), observed=Statistics.of([100.0]))
                    for size in job.batch_sizes}  # fmt: skip
            arms[BEST] = replace(arms[BEST], trials=trials)
            arms[DEFAULT] = replace(arms[DEFAULT], **arm)
            history = History(job, arms, in_flight=in_flight)
            found.add(with_control(history, suggestion, lambda _: FakeJudge(SavingsWord.NOT_SHOWN, 1)))
        return found

    def test_control_run_replaces_a_run_at_the_best_size(self) -> None:
        best = Suggestion(BEST, Origin.INCUMBENT, "best so far", bound=EpochBound(3, "hopeless"))
        (control,) = self.chosen(self.job, best) - {best}
        assert (control.batch_size, control.origin) == (DEFAULT, Origin.CONTROL)
        assert control.reason == "control run at your default, 32: it measures the saving"
        assert control.bound == EpochBound(self.job.max_epochs, "a control run is not stopped early")

    def test_control_runs_are_skipped_if_harmful(self) -> None:
        best = Suggestion(BEST, Origin.INCUMBENT, "best so far")
        for suggestion in (replace(best, origin=Origin.EXPLORATION), replace(best, batch_size=DEFAULT)):
            assert self.chosen(self.job, suggestion) == {suggestion}
        for changed in ({"controls": "off"}, {"policy": ZEUS}):
            assert self.chosen(self.job.model_copy(update=changed), best) == {best}
        assert self.chosen(self.job, best, infeasible=EndReason.OUT_OF_MEMORY) == {best}
        # The default misses the target as often as it reaches it.
        assert self.chosen(self.job, best, observed=Statistics.of([100.0, 900.0])) == {best}
        # The default has crashed repeatedly since it reached the target.
        assert len(self.chosen(self.job, best, trials=6)) == 2
        assert self.chosen(self.job, best, trials=8) == {best}
        # Jobs with other policies, or copies, may never have run the default.
        assert len(self.chosen(self.job, best, trials=0, observed=Statistics(), completed=Statistics())) == 2

    def test_second_control_run_waits_for_the_first(self) -> None:
        best = Suggestion(BEST, Origin.INCUMBENT, "best so far")
        under_way = TrialRecord(
            trial_number=1, batch_size=DEFAULT, state=TrialState.RUNNING, origin=Origin.CONTROL, started_event=1
        )
        assert self.chosen(self.job, best, (under_way,)) == {best}
        assert self.chosen(self.job, best, (replace(under_way, origin=Origin.EXPLORATION),)) != {best}


def test_newly_crashing_default_is_not_run_in_each_recurrence() -> None:
    """The default reached the target twice; since then, each of its trials crashes."""
    job = InMemoryJob(make_job((DEFAULT, BEST), DEFAULT, policy=GP_VOI, mab_seed=1, target_metric=0.9))
    rng = np.random.default_rng(1)
    sizes: list[int] = []
    for number in range(1, 41):
        size = job.begin_trial(rng).batch_size
        if size == DEFAULT and sizes.count(DEFAULT) >= 2:
            job.end_trial(number, Ending(detail="it crashed"), retries=3)
        else:
            energy_j = 100.0 if size == DEFAULT else 50.0
            job.judge(number, Report(time_s=1.0, energy_j=energy_j, epoch=5.0, metric=0.95))
        sizes.append(size)
    assert sizes.count(BEST) >= 30
    assert (DEFAULT, DEFAULT, DEFAULT) not in zip(sizes, sizes[1:], sizes[2:], strict=False)
