"""Whole histories of a seeded job with batch sizes derived by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bso_server.core.policy import suggest
from tests.support.histories import Life, make_job
from zeus_plugins.protocol import Origin, TrialState


class Run(NamedTuple):
    """A run of the job with a single report, at its end.

    Attributes:
        batch_size: Size that the policy must choose.
        cost_j: Cost of the run, joules.
        reached: True if the metric reached the target, None after a crash.
    """

    batch_size: int
    cost_j: float
    reached: bool | None


SEED = 31
JOB = make_job((8, 16, 32, 64), 32, mab_num_explorations=3, mab_seed=SEED)
EXPLORATION = [
    Run(32, 110, True),  # round 1 starts at the default,
    Run(16, 100, True),  # goes down,
    Run(8, 150, False),  # where 8 misses the target and ends this direction;
    Run(64, 122, True),  # then up from the default. 16, 32 and 64 survive; 16 was the cheapest.
    Run(16, 108, True),  # Round 2 starts at 16; 8, the only smaller size, is out;
    Run(32, 104, None),  # so the round goes up. This run crashes
    Run(32, 104, True),  # and is tried again.
    Run(64, 106, True),  # No size dropped out: 16, 32 and 64 enter the bandit stage with two observations each.
]
BANDIT = [
    # A decision begins with a permutation; the first size with fewer than three observations is played.
    Run(64, 204, False),  # [64, 16, 32]. Above twice the cheapest run's 100 J: stopped early, but learned from.
    Run(32, 103, True),  # [32, 64, 16]
    Run(16, 107, True),  # [32, 16, 64], where 32 has its three observations
    # From here on, every size has three observations, and the lowest draw wins: a normal number per size, of the mean
    # and the error of the mean of its costs.
    Run(64, 115, True),  # Three runs of 106 to 204 J allow such a low draw.
    Run(16, 99, True),
    Run(16, 112, True),
    Run(32, 111, None),  # A crash teaches no cost.
    Run(16, 103, True),
    Run(32, 99, True),
    Run(16, 101, True),
    Run(32, 106, True),
    Run(16, 98, True),
]
BATCH_SIZES = [run.batch_size for run in EXPLORATION + BANDIT]


def live(life: Life, between: Callable[[Life], None] = lambda _: None) -> list[int]:
    """Play all runs one after another; return the sizes that the policy chose."""
    for run in EXPLORATION + BANDIT:
        trial = life.ask()
        if run.reached is None:
            life.move(trial, TrialState.FAILED)
        else:
            verdict = life.report(trial, run.cost_j, epoch=JOB.max_epochs, metric=float(run.reached))
            assert verdict.converged == run.reached
        between(life)
    return [trial.batch_size for trial in life.trials]


def test_seeded_history_matches_the_hand_derivation() -> None:
    life = Life(JOB, np.random.default_rng(SEED))
    assert live(life) == BATCH_SIZES
    assert [trial.origin for trial in life.trials] == [Origin.EXPLORATION] * 8 + [Origin.BANDIT] * 12
    unusual = {trial.trial_number: trial.state for trial in life.trials if trial.state is not TrialState.COMPLETED}
    assert unusual == {
        3: TrialState.EXHAUSTED,
        6: TrialState.FAILED,
        9: TrialState.EARLY_STOPPED,
        15: TrialState.FAILED,
    }


def test_exploration_leaves_the_generator_untouched() -> None:
    states: list[object] = []
    live(Life(JOB, np.random.default_rng(SEED)), lambda life: states.append(life.rng.bit_generator.state))
    fresh = np.random.default_rng(SEED).bit_generator.state
    assert states[:8] == [fresh] * 8
    assert all(before != after for before, after in pairwise(states[7:]))


def reason(life: Life) -> str:
    """Return the reason for the next trial's batch size, without dispatching the trial."""
    rng = np.random.default_rng()
    rng.bit_generator.state = life.rng.bit_generator.state
    return suggest(life.history, rng).reason


def test_reasons_are_stated_in_plain_words() -> None:
    life = Life(JOB, np.random.default_rng(SEED))
    reasons: list[str] = [reason(life)]
    live(life, lambda life: reasons.append(reason(life)))
    for number, *parts in (
        (1, "round 1 of 2", "your default size"),
        (2, "round 1 of 2", "smaller than your default size, 32"),
        (4, "round 1 of 2", "larger than your default size, 32"),
        (5, "round 2 of 2", "the cheapest of the round before"),
        (6, "round 2 of 2", "larger than the cheapest of the round before, 16"),
        (9, "measured 3 times; ", "was measured twice"),
        (12, "another trial: 64 may be cheaper than 16, the best so far, expected "),
    ):
        for part in parts:
            assert part in reasons[number - 1]

    drawn = [one for one in reasons if one.startswith(("best so far", "another trial"))]
    told = r"(best so far,|another trial: (16|32|64) may be cheaper than (16|32|64), the best so far,)"
    assert all(re.fullmatch(rf"{told} expected [0-9.]+ J", one) for one in drawn)
    assert len({one.split()[0] for one in drawn}) == 2


def test_concurrent_runs_follow_the_hand_derivation() -> None:
    life = Life(make_job((8, 16, 32), 16, num_pruning_rounds=1, mab_seed=8), np.random.default_rng(8))

    def ask(batch_size: int, origin: Origin) -> int:
        trial = life.ask()
        assert (trial.batch_size, trial.origin) == (batch_size, origin)
        return trial.trial_number

    def complete(trial_number: int, cost_j: float) -> None:
        assert life.report(life.trials[trial_number - 1], cost_j, epoch=1, metric=1.0).converged

    ask(16, Origin.EXPLORATION)  # trial 1, the default
    ask(16, Origin.CONCURRENT)  # trial 2, while 1 runs: the default again, because no cost is known
    complete(1, 100)
    ask(8, Origin.EXPLORATION)  # trial 3
    ask(16, Origin.CONCURRENT)  # trial 4: 16 is the cheapest so far
    complete(3, 98)
    ask(32, Origin.EXPLORATION)  # trial 5
    ask(8, Origin.CONCURRENT)  # trial 6: now 8 is the cheapest
    for part in ("while trial 5 explores 32: ", "98 J in trial 3"):
        assert part in reason(life)
    complete(2, 95)
    complete(6, 103)
    complete(5, 120)
    # Arms enter with one observation each, from their exploration; concurrent trials 2 and 6 do not count.
    ask(32, Origin.BANDIT)  # trial 7, order [32, 16, 8]: all have fewer than two
    ask(8, Origin.BANDIT)  # trial 8, order [8, 32, 16]: a running trial is no observation
    complete(4, 105)  # ended within the stage: 16 learns from 100, 95 and 105, trials 1, 2 and 4
    ask(32, Origin.BANDIT)  # trial 9, order [16, 32, 8]: 16 has two now
    complete(7, 125)
    complete(8, 99)
    # 8: 98, 103, 99 (trials 3, 6, 8); 16: unchanged; 32: 120, 125 (trials 5 and 7). All have two.
    ask(16, Origin.BANDIT)  # trial 10: draws of 98.8, 96.7 and 121.1 J
    ask(8, Origin.BANDIT)  # trial 11: 98.1, 101.5 and 121.4 J; trials 9 and 10 are still running
