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
from bso_server.core.verdict import LEAST_CONTROLS, Judge, Run, Verdict, is_control_due, run_of, with_control
from tests.support.histories import make_job
from zeus_plugins.protocol import GP_VOI, ZEUS, CreatedJob, Ending, EndReason, Origin, SavingsWord, Share, TrialState

DEFAULT, BEST, OTHER = 32, 256, 512


def run(size: int, cost_j: float, epochs: float = 10, *, explores: bool = False) -> Run:
    return Run(size, epochs, cost_j, explores)


def judged(runs: Sequence[Run], best: int = BEST, wasted_j: float = 0.0) -> Verdict:
    judge = Judge(DEFAULT, best)
    judge.learn(runs)
    return judge.verdict(wasted_j)


EXPLORED = [run(DEFAULT, 100), run(BEST, 52, explores=True)]


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


def test_verdict_needs_the_first_run_and_a_control_run() -> None:
    runs = [*EXPLORED, *recurring(100, 40, 1)]
    assert judged(runs[:-1]).word is SavingsWord.NOT_SHOWN
    assert judged(runs[:-1]).cause == f"1 of at least {LEAST_CONTROLS} runs at 32 so far"
    assert judged([*runs, *[run(BEST, 40)] * 3, run(DEFAULT, 100)]).word is SavingsWord.SAVES
    # Three times the spread at the default would explain a smaller difference.
    assert judged([*EXPLORED, *recurring(100, 90, 1)]).word is SavingsWord.NOT_SHOWN


def test_first_run_counts_without_the_first_epoch() -> None:
    """The first of the 10 epochs of the first run cost 500 J; the others cost 10 J each."""
    first = TrialRecord(
        trial_number=1, batch_size=DEFAULT, state=TrialState.COMPLETED, origin=Origin.EXPLORATION, epoch=10.0,
        first_epoch=1.0, first_energy_j=500.0, energy_j=590.0,
    )  # fmt: skip
    slow = run_of(first, 590.0, 500.0)
    assert (slow.amount, slow.later_pace, slow.is_control) == (590.0, pytest.approx(math.log(10.0)), False)
    assert run_of(replace(first, first_epoch=10.0), 590.0, 590.0).later_pace is None
    assert run_of(replace(first, origin=Origin.CONTROL), 590.0, 500.0).is_control
    # With a start-up of 98 of its 100 s, that is 490 J, the first epoch counts, too.
    for first_epoch, first_time_s, first_j in ((1.0, 100.0, 500.0), (10.0, 118.0, 590.0)):
        known = replace(first, first_epoch=first_epoch, first_time_s=first_time_s, startup_s=98.0)
        assert run_of(known, 590.0, first_j).later_pace == pytest.approx(math.log(10.0))
    rest = [EXPLORED[1], *recurring(100, 60, 3)]
    assert judged([slow, *rest]).now == judged([run(DEFAULT, 100), *rest]).now
    assert judged([slow, *rest]).now != judged([run(DEFAULT, 590), *rest]).now


def test_runs_on_a_busy_machine_are_compared_only_among_themselves() -> None:
    quiet = [*EXPLORED, *recurring(100, 60, 5)]
    # Other work has slowed the runs at the best size and hides their saving.
    slowed = [
        replace(each, amount=3 * each.amount, is_busy=True) if each.batch_size == BEST else each for each in quiet
    ]
    unmarked = [replace(each, is_busy=False) for each in slowed]
    words = [judged(runs).word for runs in (quiet, slowed, unmarked)]
    assert words == [SavingsWord.SAVES, SavingsWord.NOT_SHOWN, SavingsWord.LOSES]
    assert judged(slowed).cause == "15 of 21 runs were on a busy machine"
    assert judged(slowed).controls == judged(quiet).controls == 6
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
    so_far = Share(low=0.1, middle=0.2, high=0.3)
    assert not Verdict(SavingsWord.NOT_SHOWN, 1, "1 of at least 2 runs", so_far=so_far).is_paid_back
    assert Verdict(SavingsWord.SAVES, 2, None, so_far=so_far).is_paid_back


def test_exploration_is_no_evidence() -> None:
    """One slow first run of the default, which an early version of the page called a saving of 69 %."""
    runs = [
        run(DEFAULT, 1690),
        *(run(BEST, 520, explores=True) for _ in range(3)),
        *(run(BEST, 520) for _ in range(12)),
    ]
    verdict = judged(runs)
    assert (verdict.word, verdict.is_paid_back) == (SavingsWord.NOT_SHOWN, False)
    assert verdict.cause == "1 of at least 2 runs at 32 so far"
    assert judged(runs[1:]).cause == "no control run at 32 yet"


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


def test_runs_needed_is_an_order_of_magnitude() -> None:
    runs = [*EXPLORED, *recurring(100, 93, 20)]
    words = [judged(runs[:count]).word for count in range(len(runs))]
    shown = words.index(SavingsWord.SAVES)
    verdict = judged(runs[: len(EXPLORED) + 8])
    assert verdict.runs_needed in (10, 30, 100)
    assert 0.4 * (shown - 10) <= verdict.runs_needed <= 3 * (shown - 10)
    assert "soon" not in (verdict.cause or "")
    late = judged([*EXPLORED, *recurring(100, 100, 12)])
    assert late.runs_needed is None
    assert (late.cause or "").endswith("; it will not be settled soon")


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
    assert one_by_one.verdict().controls == 3


def test_run_without_measured_energy_is_no_evidence() -> None:
    runs = [*EXPLORED, *recurring(100, 50, 4)]
    verdict = judged([*runs, run(BEST, 0), run(DEFAULT, 0)])
    assert verdict.controls == judged(runs).controls


class FakeJudge(Judge):
    """A judge with a given word and share of cost that control runs have forgone."""

    def __init__(self, word: SavingsWord, forgone: float = 0.0, each: float = 0.01) -> None:
        super().__init__(DEFAULT, BEST, 0.05)
        self._word, self._forgone, self._each = word, forgone, each

    def now(self) -> tuple[SavingsWord, Effect | None]:
        return self._word, Effect(0.1, 0.5, 3.0)

    def forgone(self, more: int = 0) -> float:
        return self._forgone + more * self._each


def controlled(made: int, cost_j: float = 100.0, runs: int = 20) -> list[Run]:
    """Return control runs, and runs at the best size of 50 J."""
    return [*EXPLORED, *[replace(run(DEFAULT, cost_j), is_control=True)] * made, *[run(BEST, 50)] * runs]


class TestControlRuns:
    job = make_job((DEFAULT, BEST), DEFAULT, policy=GP_VOI)

    def places(self, word: SavingsWord, seed: int, **fields: float) -> list[int]:
        """Return the places among 1,000 trials where a control run is due."""
        job = self.job.model_copy(update={"mab_seed": seed, "controls": 0.05})
        judge = FakeJudge(word, **fields)
        return [number for number in range(1000) if is_control_due(job, judge, number)]

    def test_places_of_control_runs_are_drawn(self) -> None:
        for seed in range(5):
            assert len(self.places(SavingsWord.NOT_SHOWN, seed)) == pytest.approx(300, abs=50)
        assert any(a != b for a, b in pairwise(self.places(SavingsWord.NOT_SHOWN, seed) for seed in range(5)))

    def test_control_runs_stay_within_the_budget(self) -> None:
        assert self.places(SavingsWord.NOT_SHOWN, 1, forgone=0.0399)
        assert self.places(SavingsWord.NOT_SHOWN, 1, forgone=0.0401) == []
        # The budget is 2 % once a saving is shown.
        assert self.places(SavingsWord.SAVES, 1, forgone=0.0099)
        assert self.places(SavingsWord.SAVES, 1, forgone=0.0101) == []
        assert self.places(SavingsWord.LOSES, 1) == []

    def test_forgone_cost_comes_from_the_means_until_the_first_control_run(self) -> None:
        """A control run costs 100 J in place of 50 J; two earlier runs and 20 runs at the best size cost 1152 J."""
        judge = Judge(DEFAULT, BEST)
        judge.learn(controlled(0))
        mean_j = (52 + 20 * 50) / 21
        assert judge.forgone() == 0.0
        assert judge.forgone(1) == pytest.approx((100 - mean_j) / 1152)
        assert judge.forgone(3) == pytest.approx(3 * judge.forgone(1))

    def test_forgone_cost_comes_from_the_model_after_the_first_control_run(self) -> None:
        judge, lucky = Judge(DEFAULT, BEST), Judge(DEFAULT, BEST)
        judge.learn(controlled(4))
        spent_j = sum(each.amount for each in controlled(4))
        assert judge.forgone() == pytest.approx(4 * 50 / spent_j, rel=0.1)
        assert judge.verdict().control_runs == (
            f"control runs have cost {judge.forgone():.1%} of the job so far, "
            "and the next one waits until this is below 2%"
        )
        # Control runs that were cheap by chance have not been free.
        lucky.learn([*controlled(2), *[replace(run(DEFAULT, 30), is_control=True)] * 2])
        assert lucky.forgone() > 0.02

    def test_job_whose_control_runs_are_off_names_only_earlier_ones(self) -> None:
        before, after = Judge(DEFAULT, BEST, 0.0), Judge(DEFAULT, BEST, 0.0)
        before.learn(controlled(0))
        after.learn(controlled(4))
        assert not before.verdict().control_runs
        assert after.verdict().control_runs == f"earlier control runs have cost {after.forgone():.1%} of the job"

    def test_default_of_many_times_the_cost_spends_the_budget_at_once(self) -> None:
        """The first run and a control run cost 500 J, 80 runs at the best size 50 J: 450 J of 5000 J were forgone."""
        judge = Judge(DEFAULT, BEST)
        judge.learn([run(DEFAULT, 500), *[run(BEST, 50)] * 80])
        assert judge.forgone(1) == pytest.approx(450 / 4500)
        judge.learn([replace(run(DEFAULT, 500), is_control=True)])
        assert judge.forgone() == pytest.approx(450 / 5000)
        assert judge.forgone(1) == pytest.approx(2 * 450 / 5000)

    def test_control_run_at_a_default_that_has_become_far_dearer_is_the_last_one(self) -> None:
        """Before a change, the default costs 60 J; then a control run costs 5000 J, and runs at the best size 50 J."""
        judge = Judge(DEFAULT, BEST)
        judge.learn([*[run(DEFAULT, 60)] * 8, *controlled(2)[1:], replace(run(DEFAULT, 5000), is_control=True)])
        judge.learn([run(BEST, 50)] * 10)
        assert judge.forgone() > 0.25
        assert judge.forgone(1) > judge.limit()

    def test_judge_without_runs_at_the_best_size_gets_no_control_run(self) -> None:
        judge = Judge(DEFAULT, OTHER)
        judge.learn(controlled(1))
        assert judge.forgone(1) == math.inf
        assert Judge(DEFAULT, DEFAULT).forgone(1) == 0.0

    def chosen(
        self, job: CreatedJob, suggestion: Suggestion, in_flight: tuple[TrialRecord, ...] = (), **arm: object
    ) -> set[Suggestion]:
        """Return the suggestions that replace the given suggestion after 2 to 40 trials."""
        found = set()
        for trials in range(1, 40):
            arms = {size: Arm(size, trials=1, completed=Statistics.of([100.0]), observed=Statistics.of([100.0]))
                    for size in job.batch_sizes}  # fmt: skip
            arms[BEST] = replace(arms[BEST], trials=trials)
            arms[DEFAULT] = replace(arms[DEFAULT], **arm)
            history = History(job, arms, in_flight=in_flight)
            found.add(with_control(history, suggestion, lambda _: FakeJudge(SavingsWord.NOT_SHOWN)))
        return found

    def test_control_run_replaces_a_run_at_the_best_size(self) -> None:
        best = Suggestion(BEST, Origin.INCUMBENT, "best so far", bound=EpochBound(3, "hopeless"))
        (control,) = self.chosen(self.job, best) - {best}
        assert (control.batch_size, control.origin) == (DEFAULT, Origin.CONTROL)
        assert control.reason == (
            "control run at your default, 32: it measures the saving; "
            "control runs have cost 0.0% of the job so far, at most 5%"
        )
        assert control.bound == EpochBound(self.job.max_epochs, "a control run is not stopped early")

    def test_control_runs_are_skipped_if_harmful(self) -> None:
        best = Suggestion(BEST, Origin.INCUMBENT, "best so far")
        for suggestion in (replace(best, origin=Origin.EXPLORATION), replace(best, batch_size=DEFAULT)):
            assert self.chosen(self.job, suggestion) == {suggestion}
        for changed in ({"controls": 0.0}, {"policy": ZEUS}):
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
            job.end_trial(number, Ending(detail="it crashed"))
        else:
            energy_j = 100.0 if size == DEFAULT else 50.0
            job.judge(number, Report(time_s=1.0, energy_j=energy_j, epoch=5.0, metric=0.95))
        sizes.append(size)
    assert sizes.count(BEST) >= 30
    assert (DEFAULT, DEFAULT, DEFAULT) not in zip(sizes, sizes[1:], sizes[2:], strict=False)
