"""Savings of a job: sums over trials, and their sentences, with literal numbers."""

from __future__ import annotations

import pytest

from bso_server.core.model import ExpectedCost
from bso_server.core.savings import Amounts, Tally, amounts, default_cost, savings
from bso_server.core.verdict import Evidence, Run
from tests.support.histories import make_job
from zeus_plugins.protocol import AmountSaved, Origin, SavingsView, SavingsWord, Share, TrialState

# Cost = energy/2 + 50 · time.
JOB = make_job((8, 16, 32), 16, eta_knob=0.5, max_power=100)
COMPLETED, STOPPED, EXHAUSTED = TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED


def found(*trials: tuple[int, TrialState, Origin, float, float], best: int | None = 32) -> SavingsView:
    """Return the savings of trials (size, state, origin, energy, time), which ended in this order after 10 epochs."""
    tallies = [Tally(size, state, origin, 1, energy_j, time_s) for size, state, origin, energy_j, time_s in trials]
    evidence = {name: Evidence(16) for name in Amounts._fields}
    for size, state, origin, energy_j, time_s in trials:
        if state is COMPLETED:
            took = amounts(JOB, energy_j=energy_j, time_s=time_s)
            for name, each in evidence.items():
                each.add([Run(size, 10, getattr(took, name), origin is Origin.EXPLORATION)])
    return savings(JOB, tallies, best, lambda name: evidence[name].judge(best or 16))


FIRST = (16, COMPLETED, Origin.EXPLORATION, 400.0, 4.0)
CONTROL = (16, COMPLETED, Origin.CONTROL, 400.0, 4.0)
BEST = (32, COMPLETED, Origin.INCUMBENT, 200.0, 3.0)


def test_no_saving_is_claimed_before_the_target_is_reached() -> None:
    view = found((16, EXHAUSTED, Origin.EXPLORATION, 900, 9), best=None)
    assert (view.word, view.cost_j.now, view.cost_j.saved) == (SavingsWord.NOT_SHOWN, None, None)
    assert view.in_words == "No run has reached the target yet."


def test_sums_cover_all_ended_trials() -> None:
    view = found(
        FIRST,
        (8, STOPPED, Origin.EXPLORATION, 150, 1),
        CONTROL,
        BEST,
        (8, TrialState.RUNNING, Origin.EXPLORATION, 77, 7),
        (8, TrialState.WITHDRAWN, Origin.EXPLORATION, 1e9, 7),
    )
    assert (view.energy_j.spent, view.time_s.spent) == (1150, 12)
    assert view.cost_j.spent == 575 + 600
    assert (view.exploration_cost_j, view.control_cost_j) == (400 + 125, 400)
    assert view.recurrences == 3


def test_energy_time_and_cost_are_judged_separately() -> None:
    """Save 200 of 400 J, 1 of 4 s, and 150 of 400 J of cost."""
    view = found(FIRST, *[BEST, BEST, CONTROL] * 8)
    for amount, share in ((view.energy_j, 0.5), (view.time_s, 0.25), (view.cost_j, 0.375)):
        assert amount.now is not None
        assert amount.now.middle == pytest.approx(share, abs=0.01)
        assert amount.saved is not None
    # 16 runs at the best size instead of 16 runs at 400 J and 4 s.
    assert view.energy_j.saved == pytest.approx(16 * 200, rel=0.03)
    assert view.time_s.saved == pytest.approx(16 * 1, rel=0.06)


def test_failures_at_the_default_are_not_charged_to_the_job() -> None:
    runs = [FIRST, *[BEST, BEST, CONTROL] * 8]
    failed = (16, EXHAUSTED, Origin.CONTROL, 5000.0, 50.0)
    before, after = found(*runs), found(*runs, failed)
    assert after.energy_j.spent == before.energy_j.spent + 5000
    assert after.energy_j.saved == before.energy_j.saved
    stopped = found(*runs, (8, STOPPED, Origin.EXPLORATION, 5000.0, 50.0))
    assert stopped.energy_j.saved is None


def view_of(word: SavingsWord, now: Share | None, best: int = 32, **fields: object) -> SavingsView:
    nothing = AmountSaved(spent=1, now=None, so_far=None, saved=None)
    known = {"cost_j": nothing.model_copy(update={"now": now}), "energy_j": nothing, "time_s": nothing, "controls": 3}
    unset = dict.fromkeys(("runs_needed", "cause"))
    sums = {"recurrences": 9, "exploration_cost_j": 1, "control_cost_j": 1}
    told = {"word": word, "default_batch_size": 16, "batch_size": best}
    return SavingsView.model_validate({**told, **known, **unset, **sums, **fields})


SAVED, LOST = Share(low=0.25, middle=0.31, high=0.37), Share(low=-0.14, middle=-0.1, high=-0.06)


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (view_of(SavingsWord.SAVES, SAVED), "32 saves 31 % (25 to 37 %) of what a run costs at your default, 16."),
        (view_of(SavingsWord.LOSES, LOST), "32 costs 10 % (6 to 14 %) more than your default, 16."),
        (
            view_of(SavingsWord.NOT_SHOWN, SAVED, cause="1 of 3", runs_needed=30),
            "Whether 32 saves against your default, 16, is not shown yet: a run at 32 costs 69 % (63 to 75 %) of one "
            "at 16. 1 of 3; about 30 more runs would settle it.",
        ),
        (view_of(SavingsWord.NOT_SHOWN, None, 16), "Your default, 16, is the best batch size so far."),
    ],
)
def test_claims_in_words(view: SavingsView, words: str) -> None:
    assert view.in_words == words


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Share(low=-0.003, middle=0.004, high=0.05), "0 % (0 to 5 %)"),
        (Share(low=-0.05, middle=-0.002, high=0.004), "0 % (0 to 5 %)"),
        (Share(low=None, middle=-0.002, high=0.1), "0 %"),
    ],
)
def test_no_share_is_minus_zero(share: Share, words: str) -> None:
    assert share.in_words == words


def test_saving_is_claimed_only_after_exploration_is_paid_back() -> None:
    both = {"spent": 69, "now": SAVED, "so_far": Share(low=0.02, middle=0.1, high=0.2)}
    paid = view_of(SavingsWord.SAVES, None, cost_j=AmountSaved(**both, saved=7.7))
    unpaid = view_of(SavingsWord.SAVES, None, cost_j=AmountSaved(**both, saved=None))
    told = "All runs so far, with exploration and control runs,"
    told += " cost 90 % (80 to 98 %) of what the default would have cost"
    assert paid.so_far == f"{told}."
    assert unpaid.so_far == f"{told}: not shown to be paid back yet."


def test_default_costs_what_the_saving_says() -> None:
    """The best size costs 69 J, which is 31 % (25 to 37 %) less."""
    assert default_cost(69, SAVED) == ExpectedCost(pytest.approx(100), (pytest.approx(92), pytest.approx(69 / 0.63)))
    for unbounded in (Share(low=None, middle=0.31, high=0.37), Share(low=0.25, middle=0.31, high=1)):
        assert default_cost(69, unbounded) == ExpectedCost(pytest.approx(100), None)


def test_uninformative_interval_is_not_shown() -> None:
    hardly = AmountSaved(spent=69, now=SAVED, so_far=Share(low=-0.3, middle=0.5, high=1.0), saved=None)
    assert not view_of(SavingsWord.NOT_SHOWN, None, cost_j=hardly).so_far
