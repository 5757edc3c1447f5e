"""Numbers behind decisions: they are stored, bounded in size, and equal to a replay's."""

from __future__ import annotations

import math

import pytest

from bso_server.core.gp_voi.policy import chance_in_words
from bso_server.core.model import BAND_SDS, ExpectedCost
from bso_server.core.policy import expectations, suggest
from bso_server.errors import UnknownTrialError
from bso_server.service import reading
from bso_server.service.reading import stop_in_words
from bso_server.storage.rows import StoredDecision, decision_from, decision_row
from tests.support.histories import Life, make_job
from tests.support.service import job_service
from zeus_plugins.protocol import (
    GP_VOI,
    OWN_POLICIES,
    ZEUS,
    ArmView,
    CandidateWorth,
    Decision,
    Origin,
    SizeBelief,
    StopRule,
    TrialState,
    joules_in_words,
)

SIZES = (8, 16, 32, 64)


def test_longest_decision_takes_at_most_4_kb_and_reads_back_unchanged() -> None:
    sizes, number = range(2**31 - 200, 2**31), 1.234e-90
    longest = Decision(
        sizes=tuple(
            SizeBelief(batch_size=size, expected_cost_j=number, low_j=number, high_j=number, chance_best=0.1234)
            for size in sizes
        ),
        candidates=tuple(CandidateWorth(batch_size=n, value=number, loss=-number, stop_epochs=n) for n in sizes),
        incumbent=2**31 - 1,
        stop=StopRule(max_cost_j=1.2345678901234567e-300, max_epochs=2**31 - 1),
    )
    row = decision_row(StoredDecision("job", 1, longest))
    assert 3500 < len(row["decision"]) <= 4096
    assert decision_from(row).decision == longest


def test_truncated_decision_keeps_the_most_important_entries() -> None:
    sizes = tuple(SizeBelief(batch_size=size, chance_best=1 / size) for size in range(1, 101))
    candidates = tuple(CandidateWorth(batch_size=size, value=size, loss=1) for size in range(1, 101))
    decision = Decision(sizes=sizes, candidates=candidates)
    assert [each.batch_size for each in decision.sizes] == list(range(1, 65))
    assert [each.batch_size for each in decision.candidates] == list(range(85, 101))


async def test_explanation_shows_a_band_for_each_belief(database_url: str) -> None:
    async with job_service(database_url, policy=GP_VOI) as server:
        first = await server.store.read(reading.explain, server.job_id)
        assert first.decision == Decision(sizes=tuple(SizeBelief(batch_size=size) for size in (8, 16, 32)))
        assert first.sentence == f"first run of job {server.job_id}"
        for _ in range(3):
            trial = await server.suggest()
            for epoch in range(1, 5):
                if (await server.report(trial, cost_j=100.0 * epoch, epoch=epoch, metric=0.5 + epoch / 8)).stop_train:
                    break
        told = await server.store.read(reading.explain, server.job_id, 2)
        assert (told.trial_number, told.state, told.policy) == (2, TrialState.COMPLETED, GP_VOI)
        assert told.decision is not None
        assert told.decision.incumbent == 16
        for size in told.decision.sizes:
            assert size.low_j is not None
            assert size.high_j is not None
            assert size.expected_cost_j is not None
            assert size.low_j < size.expected_cost_j < size.high_j
        assert sum(size.chance_best or 0 for size in told.decision.sizes) == pytest.approx(1, abs=1e-3)
        assert {each.batch_size for each in told.decision.candidates} == {8, 32}
        with pytest.raises(UnknownTrialError):
            await server.store.read(reading.explain, server.job_id, 9)


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_explained_next_choice_is_the_choice_made(database_url: str, policy: str) -> None:
    async with job_service(database_url, policy=policy, mab_seed=3) as server:
        for _ in range(12):
            told = await server.store.read(reading.explain, server.job_id)
            again = await server.store.read(reading.explain, server.job_id)
            trial = await server.suggest()
            assert told == again
            assert (told.batch_size, told.origin) == (trial.batch_size, trial.origin)
            assert told.sentence.startswith(trial.reason or "")
            kept = await server.store.read(reading.explain, server.job_id, trial.trial_number)
            assert kept.decision == told.decision
            await server.reach(trial, cost_j=500.0 + trial.batch_size)


def test_chances_in_words() -> None:
    words = ["hardly any", "about a one-in-ten", "about a third", "about an even", "a good", "almost every"]
    chances = [0.001, 0.1, 0.33, 0.5, 0.9, 1.0]
    assert [chance_in_words(chance) for chance in chances] == [f"{each} chance" for each in words]


@pytest.mark.parametrize(
    ("joules", "words"),
    [(0.0, "0 J"), (81.26, "81.3 J"), (9999, "10000 J"), (12_345, "12.3 kJ"), (2.5e6, "2.5 MJ"), (3e12, "3000 GJ")],
)
def test_costs_in_words(joules: float, words: str) -> None:
    assert joules_in_words(joules) == words


def test_expected_cost_is_shown_beside_the_measured_mean() -> None:
    def words(runs: int, mean_j: float | None) -> str:
        fields = {"trials": runs, "n": runs, "mean_cost_j": mean_j, "std_cost_j": None, "infeasible": None}
        return ArmView(batch_size=8, expected_cost_j=102, expected_low_j=90, expected_high_j=110, **fields).in_words

    assert words(0, None) == words(3, 104) == "expected 102 J"
    why = "ignores that later runs and other sizes' runs count, too"
    assert words(1, 1784) == f"expected 102 J without start-up (its run, 1780 J, {why})"
    assert words(22, 88) == f"expected 102 J without start-up (the mean of its runs, 88 J, {why})"


def test_stop_rule_is_described_in_words() -> None:
    assert stop_in_words(StopRule(max_epochs=9), 50) == "stop it after 9 epochs unless it has reached the target"
    assert (
        stop_in_words(StopRule(max_epochs=1), 50, "dear")
        == "stop it after 1 epoch unless it has reached the target: dear"
    )
    assert (
        stop_in_words(StopRule(max_epochs=50, max_cost_j=162), 50)
        == "stop it at 162 J unless it has reached the target"
    )
    assert stop_in_words(StopRule(max_epochs=50), 50) == stop_in_words(None, 50) == ""


def test_zeus_reports_the_expected_costs_of_survivors() -> None:
    life = Life(make_job((8, 16), 16, num_pruning_rounds=1, mab_num_explorations=1, policy=ZEUS))
    assert suggest(life.history, life.rng, explains=True).decision == Decision(
        sizes=(SizeBelief(batch_size=8), SizeBelief(batch_size=16)), stop=StopRule(max_epochs=10)
    )
    for cost_j in (100, 150, 120, 110, 115, 112):
        life.complete(life.ask(), cost_j)
    decision = suggest(life.history, life.rng, explains=True).decision
    assert decision is not None
    assert decision.stop == StopRule(max_epochs=10, max_cost_j=200)
    assert all(size.expected_cost_j is not None for size in decision.sizes)


# --- Cost that a policy expects of each batch size, and its best size -------------------------------------------------


def life_of(policy: str, **fields: object) -> Life:
    return Life(make_job(SIZES, 16, policy=policy, **fields))


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_no_cost_is_expected_before_a_run_reaches_the_target(policy: str) -> None:
    life = life_of(policy)
    assert expectations(life.history).best is None
    life.run(16, Origin.EXPLORATION, TrialState.FAILED, 70)
    assert (dict(expectations(life.history).costs), expectations(life.history).best) == ({}, None)


def test_zeus_expects_the_mean_of_the_posterior() -> None:
    life = life_of(ZEUS)
    for size, cost_j in ((16, 400), (8, 900), (32, 200), (64, 990), (32, 500), (16, 380), (8, 950)):
        life.run(size, Origin.EXPLORATION, TrialState.COMPLETED, cost_j)
    found = expectations(life.history)
    # The cheapest run had size 32: 350 ± 150/√2 J. Size 64 did not survive; a single run shows no spread.
    for size, mean_j, std_j in ((32, 350, 150 / math.sqrt(2)), (16, 390, 10 / math.sqrt(2))):
        band_j = mean_j - BAND_SDS * std_j, mean_j + BAND_SDS * std_j
        assert found.costs[size] == ExpectedCost(mean_j, pytest.approx(band_j))
    assert found.costs[64] == ExpectedCost(990, None)
    assert found.best == 32
    life.run(32, Origin.EXPLORATION, TrialState.COMPLETED, 500)
    assert life.history.cheapest is not None
    assert life.history.cheapest.batch_size == 32
    assert expectations(life.history).best == 16


def test_zeus_expects_no_cost_of_excluded_or_dropped_sizes() -> None:
    life = life_of(ZEUS)
    life.run(8, Origin.EXPLORATION, TrialState.COMPLETED, 300)
    life.run(16, Origin.EXPLORATION, TrialState.COMPLETED, 400)
    life.run(32, Origin.EXPLORATION, TrialState.EARLY_STOPPED, 100)
    life.run(64, Origin.EXPLORATION, TrialState.COMPLETED, 200)
    life.run(64, Origin.EXPLORATION, TrialState.INFEASIBLE, 0)
    assert list(expectations(life.history).costs) == [8, 16]
    life.survivors = (16,)
    assert list(expectations(life.history).costs) == [16]


def test_size_with_only_concurrent_runs_is_expected_to_cost_their_mean() -> None:
    life = life_of(ZEUS)
    life.run(16, Origin.CONCURRENT, TrialState.COMPLETED, 400)
    assert expectations(life.history).costs == {16: ExpectedCost(400, None)}


def test_gp_voi_does_not_take_the_luckiest_run_for_the_best_size() -> None:
    life = life_of(GP_VOI, max_epochs=100)
    for size, epochs in ((16, 20), (16, 20), (32, 31), (32, 30), (16, 19), (32, 33), (32, 18), (16, 21)):
        trial = life.dispatch(size, Origin.INCUMBENT)
        for epoch in range(1, epochs + 1):
            life.report(life.trials[trial.trial_number - 1], 10.0 * epoch, epoch=epoch, metric=float(epoch == epochs))
    found, cheapest = expectations(life.history), life.history.cheapest
    assert cheapest is not None
    assert (cheapest.batch_size, found.best) == (32, 16)
    expected = found.costs[16]
    assert expected.band_j is not None
    assert expected.band_j[0] < 200 < expected.band_j[1]


def test_expected_cost_never_exceeds_max_epochs() -> None:
    life = life_of(GP_VOI, max_epochs=100)
    trial = life.dispatch(64, Origin.EXPLORATION)
    for epoch in range(1, 96):
        life.report(life.trials[trial.trial_number - 1], 10.0 * epoch, epoch=epoch, metric=float(epoch == 95))
    found = expectations(life.history)
    for size, expected in found.costs.items():
        assert expected.band_j is not None
        assert expected.band_j[0] <= expected.band_j[1], size
        # Only 64 has a known cost of an epoch: 10 J.
        if size == 64:
            assert max(expected.mean_j, expected.band_j[1]) == pytest.approx(1000, rel=0.01)


def test_running_trial_narrows_no_band() -> None:
    life = life_of(GP_VOI, max_epochs=100)
    trial = life.dispatch(16, Origin.EXPLORATION)
    for epoch in range(1, 21):
        life.report(life.trials[trial.trial_number - 1], 10.0 * epoch, epoch=epoch, metric=float(epoch == 20))
    before = expectations(life.history).costs[16]
    life.dispatch(16, Origin.INCUMBENT)
    assert expectations(life.history).costs[16] == before
    decision = suggest(life.history, life.rng, explains=True).decision
    assert decision is not None
    (told,) = (size for size in decision.sizes if size.batch_size == 16)
    assert (told.low_j, told.high_j) == pytest.approx(before.band_j, rel=1e-3)
