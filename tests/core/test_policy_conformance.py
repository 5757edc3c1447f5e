"""Conformance suite of policies: our own policies pass, and each check finds its faulty policy."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from bso_server.core import policy
from bso_server.errors import PolicyNotInstalledError
from bso_server.policies import (
    CreatedJob,
    EpochBound,
    Expectations,
    ExpectedCost,
    History,
    Memory,
    NoSurvivorError,
    Origin,
    Policy,
    StopRule,
    Suggestion,
    TrialRecord,
)
from zeus_plugins.protocol import OWN_POLICIES
from zeus_plugins.testing import check_policy


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_own_policies_conform(policy: str) -> None:
    check_policy(policy, seeds=(0, 4), trials=30)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_own_policies_conform_over_long_histories(policy: str) -> None:
    check_policy(policy, seeds=range(12), trials=80)


Suggesting = Callable[[History, np.random.Generator], Suggestion]


def smallest(history: History, rng: np.random.Generator) -> Suggestion:
    """Suggest the smallest size in each recurrence."""
    del rng
    if not history.runnable_sizes:
        raise NoSurvivorError("nothing fits")
    return Suggestion(min(history.runnable_sizes), Origin.INCUMBENT, "the smallest")


RIGHT = Policy(version="1", suggest=smallest)


def changed(**fields: object) -> Policy:
    """Return a policy that changes fields of its suggestions."""
    return replace(RIGHT, suggest=lambda history, rng: replace(smallest(history, rng), **fields))


def drawing(draw: Callable[[list[int]], int]) -> Suggesting:
    return lambda history, rng: replace(smallest(history, rng), batch_size=draw(sorted(history.runnable_sizes)))


CALLS = count()


def in_turns(sizes: list[int]) -> int:
    return sizes[next(CALLS) % len(sizes)]


def spoiling(history: History, rng: np.random.Generator) -> Suggestion:
    suggestion = smallest(history, rng)
    history.arms.clear()  # type: ignore[attr-defined]  # a read-only mapping
    return suggestion


def giving_up(history: History, rng: np.random.Generator) -> Suggestion:
    del history, rng
    raise NoSurvivorError("too tired")


def endless(history: History, rng: np.random.Generator) -> Suggestion:
    time.sleep(2)
    return smallest(history, rng)


def kept(after: Callable[[list[int], TrialRecord], list[int]]) -> Policy:
    memory = Memory(list[int], lambda job: [0] * len(job.batch_sizes), lambda memory, _, trial: after(memory, trial))
    return replace(RIGHT, memory=memory)


def changing(memory: list[int], trial: TrialRecord) -> list[int]:
    memory[0] += trial.trial_number
    return memory


def expecting(costs: dict[int, float], best: int) -> Policy:
    expected = Expectations({size: ExpectedCost(cost_j, None) for size, cost_j in costs.items()}, best)
    return replace(RIGHT, expectations=lambda _: expected)


NO_JSON = Memory(float, lambda _: math.nan, lambda memory, *_: memory)
WRONG = {
    "unknown size": (changed(batch_size=9), "9 was suggested"),
    "no reason": (changed(reason=""), "a reason is a sentence"),
    "offline": (changed(origin=Origin.OFFLINE), "were not suggested by a policy"),
    "bandit alone": (changed(origin=Origin.BANDIT), "both or neither"),
    "bandit without pruning": (changed(origin=Origin.BANDIT, survivors=(8,)), "say prunes=True"),
    "bound": (changed(bound=EpochBound(21, "long")), "stopped after 21"),
    "stop rule": (replace(RIGHT, stop_rule=lambda *_: StopRule(max_epochs=99)), "stopped after 99"),
    "counts calls": (replace(RIGHT, suggest=drawing(in_turns)), "draw only from the generator"),
    "global generator": (replace(RIGHT, suggest=drawing(random.choice)), "global generator"),
    "NumPy's generator": (
        replace(RIGHT, suggest=drawing(lambda each: int(np.random.choice(each)))),
        "global generator",
    ),
    "spoils": (replace(RIGHT, suggest=spoiling), "has changed its arguments"),
    "gives up": (replace(RIGHT, suggest=giving_up), "suggest one of them"),
    "endless": (replace(RIGHT, suggest=endless), "takes more than 0.5 s"),
    "best without a cost": (expecting({}, 8), "no cost is expected of the best"),
    "infinite cost": (expecting({8: math.inf}, 8), "expected costs are"),
    "cost of an unknown size": (expecting({9: 1.0}, 9), "unknown sizes"),
    "memory changed": (kept(changing), "has changed its arguments"),
    "memory grows": (kept(lambda memory, trial: [*memory, *[trial.trial_number] * 200]), "keep summaries"),
    "memory is no JSON": (replace(RIGHT, memory=NO_JSON), "not read back from its JSON"),
    "memory of its own": (kept(lambda memory, _: [*memory[1:], next(CALLS)]), "a replay of all trials"),
    "no decision": (replace(RIGHT, explain=lambda *_: None), "explain gives a Decision"),
}


@pytest.mark.parametrize(("policy", "told"), WRONG.values(), ids=WRONG)
def test_suite_finds_each_faulty_policy(policy: Policy, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_policy(policy, seeds=(1,), **({"limit_s": 0.5} if policy.suggest is endless else {}))


def test_suite_finds_a_policy_with_a_random_choice_per_process() -> None:
    begun: list[CreatedJob] = []
    policy = replace(RIGHT, check=begun.append, suggest=drawing(lambda sizes: sizes[len(begun) % 2 % len(sizes)]))
    with pytest.raises(AssertionError, match="lived again"):
        check_policy(policy, seeds=(1,))


def test_missing_policy_is_not_checked() -> None:
    with pytest.raises(PolicyNotInstalledError, match="'nobody' is not installed"):
        check_policy("nobody")
    assert not policy._given
