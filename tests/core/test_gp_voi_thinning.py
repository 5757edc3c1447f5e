"""Jobs with more batch sizes than policy `gp_voi` considers in one decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.gp_voi import beliefs, policy
from bso_server.core.gp_voi.beliefs import Belief
from bso_server.core.gp_voi.forecast import available_of
from bso_server.core.gp_voi.prior import Sizes
from bso_server.core.gp_voi.thinning import after, neighbours, spread, thinned, with_evidence
from bso_server.core.model import Report, after_report
from bso_server.core.policy import bounded, expectations, find, needs_bound, suggest
from bso_server.errors import NoSurvivorError
from tests.support.histories import Life, make_job, new_life, run
from tests.support.properties import examples
from zeus_plugins.protocol import GP_VOI, CreatedJob, Origin, TrialState

THOUSAND = tuple(range(8, 8001, 8))


def needed(size: int) -> float:
    """Return the epochs to the target, with a critical batch size of 2000."""
    return 10 * (1 + size / 2000)


def epoch_j(size: int) -> float:
    """Return the cost of an epoch; with `needed`, 2000 is the cheapest size, at 40 kJ."""
    return 1000 * (1 + 2000 / size)


def lived(recurrences: int, batch_sizes: tuple[int, ...] = THOUSAND, default: int = 256) -> Life:
    life = new_life(batch_sizes, default, max_epochs=100)
    for _ in range(recurrences):
        trial = life.ask()
        run(life, trial, needed(trial.batch_size), epoch_j(trial.batch_size))
    return life


# --- Selection of sizes -----------------------------------------------------------------------------------------------


def test_neighbours_are_at_doubling_distances() -> None:
    assert neighbours(range(10, 30), 20) == [19, 21, 18, 22, 16, 24, 12, 28]
    assert neighbours([8, 16, 32], 8) == [16, 32]
    # The center itself may be unavailable.
    assert neighbours([8, 16, 32], 20) == [16, 32, 8]


def test_sizes_are_spread_evenly_over_the_octaves() -> None:
    assert spread(range(8, 1025), 8) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert spread([8, 16, 24, 32, 512], 5) == [8, 24, 32, 512]
    assert spread([8, 16], 1) == [8]
    assert spread([8, 16], 0) == spread([], 3) == spread([8, 16], -1) == []


def test_sizes_with_evidence_come_first() -> None:
    job = make_job(THOUSAND, 256, policy=GP_VOI)
    known = {80: Belief(survived=3.0), 800: Belief(converged=True), 4000: Belief(missed=1)}
    found = tuple(known.get(size, Belief()) for size in THOUSAND)
    assert sorted(with_evidence(job, found, 800, [96])) == [8, 80, 96, 256, 800, 4000, 8000]


def test_too_many_sizes_with_evidence_are_thinned_around_the_center() -> None:
    job = make_job(THOUSAND, 256, policy=GP_VOI)
    everywhere = (Belief(converged=True),) * 1000
    kept = sorted(with_evidence(job, everywhere, 4000, [16, 24]))
    assert len(kept) == 40
    assert {8, 16, 24, 256, 4000, 8000} <= set(kept)
    # Of the other 34, half are the nearest sizes, and half are spread with two per octave.
    assert [size for size in kept if 3930 <= size <= 4075] == [*range(3936, 4073, 8)]
    assert [size for size in kept if size < 300] == [8, 16, 24, 32, 48, 64, 88, 128, 176, 248, 256]

    missed = tuple(Belief(converged=True, missed=int(size % 1000 == 0)) for size in THOUSAND)
    assert set(range(1000, 8001, 1000)) <= with_evidence(job, missed, 4000, [])


def test_thousand_sizes_are_thinned_before_any_trial() -> None:
    history = new_life(THOUSAND, 256).history
    few = thinned(history)
    sizes = few.job.batch_sizes
    assert len(sizes) == len(few.memory) <= 64
    assert {8, 256, 8000, 248, 264, 240, 272, 224, 288, 192, 320, 128, 384} <= set(sizes)
    # Five per octave, and the neighbours 512, 768, 1280, 2304 and 4352.
    assert [sum(low < size <= 2 * low for size in sizes) for low in (500, 1000, 2000, 4000)] == [7, 5, 6, 6]
    assert few.arms is history.arms


def test_neighbours_of_the_cheapest_size_are_considered() -> None:
    life = lived(4)
    cheapest = life.history.cheapest
    assert cheapest is not None
    assert {cheapest.batch_size - 8, cheapest.batch_size + 8} <= set(thinned(life.history).job.batch_sizes)


def test_excluded_sizes_are_not_among_the_thinned_sizes() -> None:
    life = new_life(THOUSAND, 256)
    life.exclude(life.dispatch(32))
    few = thinned(life.history)
    assert available_of(few) == (0, 1, 2)
    assert few.job.batch_sizes[:3] == (8, 16, 24)
    life.exclude(life.dispatch(8))
    history = life.history
    assert thinned(history) is history
    with pytest.raises(NoSurvivorError, match=r"none of the batch sizes \[8, 16, .* 7984, 7992, 8000\] can run"):
        life.ask()


def test_running_trials_are_considered() -> None:
    life = lived(2)
    trial = life.dispatch(7000)
    few = thinned(life.history)
    assert 7000 in few.job.batch_sizes
    assert few.in_flight == (trial,)
    # A trial with a decided bound is considered, too.
    life.move(trial, TrialState.ABANDONED)
    assert 7000 not in thinned(life.history).job.batch_sizes
    assert 7000 in thinned(life.history, 7000).job.batch_sizes


def test_more_running_trials_than_sizes_are_considered() -> None:
    life = lived(2)
    for size in THOUSAND[::10]:
        life.dispatch(size)
    few = thinned(life.history)
    assert len(few.job.batch_sizes) <= 64
    assert {trial.batch_size for trial in few.in_flight} <= set(few.job.batch_sizes)
    assert suggest(life.history, life.rng).batch_size in THOUSAND


# --- Decisions with thinned sizes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_best_size_of_a_fine_grid_is_found() -> None:
    life = lived(15)
    best = expectations(life.history).best
    assert best is not None
    # 2000 costs 40 kJ.
    assert needed(best) * epoch_j(best) < 40_000 * 1.01


def test_sizes_without_evidence_do_not_influence_beliefs() -> None:
    life = lived(6)
    ended = run(life, life.dispatch(1000), 15, epoch_j(1000))
    before = replace(life, trials=life.trials[:-1]).history.memory
    few, every = after(before, life.job, ended), beliefs.after(before, life.job, ended)
    assert [each == Belief() for each in few] == [each == Belief() for each in every]
    for one, other in zip(few, every, strict=True):
        assert one.observed == pytest.approx(other.observed)
        assert (one.costs, one.exact) == (other.costs, other.exact)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of sizes in each call of the mathematics."""
    found: list[int] = []
    of = Sizes.of

    def counting(job: CreatedJob) -> Sizes:
        found.append(len(job.batch_sizes))
        return of(job)

    monkeypatch.setattr(Sizes, "of", counting)
    return found


def entries(life: Life) -> dict[str, Callable[[], object]]:
    """Return the policy's entry points that need mathematics, by name."""
    history, ended = life.history, life.trials[-1]
    memory = find(GP_VOI).memory
    assert memory is not None
    trial = life.dispatch(400)
    assert needs_bound(life.job, trial)
    under_way, report = life.history, Report(1.0, epoch_j(400), 1.0, 0.0)
    return {
        "suggest": lambda: suggest(history, life.rng),
        "explain": lambda: suggest(history, life.rng, explains=True),
        "expectations": lambda: expectations(history),
        "bound": lambda: bounded(under_way, trial, report),
        "after": lambda: memory.after(history.memory, life.job, ended),
    }


@pytest.mark.parametrize("entry", ["suggest", "explain", "expectations", "bound", "after"])
def test_work_for_a_thousand_sizes_is_bounded(entry: str, counted: list[int]) -> None:
    work = entries(lived(5))[entry]
    counted.clear()
    work()
    assert counted
    assert max(counted) <= 64


@pytest.mark.slow
def test_work_after_trials_of_many_sizes_is_bounded(counted: list[int]) -> None:
    life = lived(1)
    for size in THOUSAND[::16]:
        run(life, life.dispatch(size, Origin.INCUMBENT), 1, epoch_j(size))
    counted.clear()
    for work in entries(life).values():
        work()
    assert max(counted) <= 64


# --- Jobs with few sizes ----------------------------------------------------------------------------------------------


def few_sizes() -> st.SearchStrategy[Life]:
    """Generate jobs with at most 64 sizes and a few trials, some of them running."""
    sizes = st.sets(st.integers(1, 4096), min_size=1, max_size=64).map(lambda found: tuple(sorted(found)))

    @st.composite
    def lives(draw: st.DrawFn) -> Life:
        batch_sizes = draw(sizes)
        life = new_life(batch_sizes, draw(st.sampled_from(batch_sizes)), max_epochs=20)
        for epochs in draw(st.lists(st.integers(1, 25), max_size=4)):
            run(life, life.ask(), epochs, 100.0)
        for size in draw(st.lists(st.sampled_from(batch_sizes), max_size=2)):
            life.dispatch(size)
        return life

    return lives()


@given(few_sizes())
@settings(max_examples=examples(30))
def test_few_sizes_are_decided_without_thinning(life: Life) -> None:
    history, rng = life.history, np.random.default_rng(0)
    assert thinned(history) is history
    own = policy.suggest(history, rng)
    assert suggest(history, rng, explains=True) == replace(own, decision=policy.explain(history, own))
    assert expectations(history) == policy.expectations(history)
    for trial in life.trials:
        if trial.state is TrialState.RUNNING:
            reported = Report(1.0, 100.0, 1.0, 0.0)
            own_bound = policy.bound_of(history, after_report(life.job, trial, reported))
            assert bounded(history, trial, reported).bound == own_bound
        else:
            assert after(history.memory, life.job, trial) == beliefs.after(history.memory, life.job, trial)
