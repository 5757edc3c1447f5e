"""Random lives of a job, whose decisions are compared with what the server requires of a policy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import TypeAdapter

from bso_server.core import policy as policies
from bso_server.core.job import InMemoryJob, replay
from bso_server.core.model import History, Report, TrialRecord
from bso_server.core.policy import Policy, find, installed
from bso_server.errors import NoSurvivorError
from tests.support.histories import make_job
from zeus_plugins.protocol import OWN_POLICIES, Ending, Origin, TrialState

T = TypeVar("T")

MAX_EPOCHS = 20
SIZES = ((32,), (8, 16, 32, 64, 128), tuple(range(8, 520, 8)))
"""The batch sizes of the jobs, by seed."""


@contextmanager
def given(name: str, policy: Policy) -> Iterator[str]:
    """Let `find` return a policy that is not installed."""
    policies._OWN[name] = cast("Any", SimpleNamespace(load=lambda: policy))
    find.cache_clear()
    try:
        yield name
    finally:
        del policies._OWN[name]
        find.cache_clear()


def check_policy(policy: str, *, seeds: Iterable[int], trials: int = 40) -> None:
    """Play each job twice, and compare the decisions with each other and with the requirements."""
    installed(policy)
    for seed in seeds:
        assert PlayedJob(policy, seed).play(trials) == PlayedJob(policy, seed).play(trials)


class PlayedJob:
    """A job in memory, and random events of its trials."""

    def __init__(self, policy: str, seed: int) -> None:
        sizes, beta = SIZES[seed % len(SIZES)], None if seed % 4 == 3 else 2.0
        terms: dict[str, Any] = {"max_epochs": MAX_EPOCHS, "num_pruning_rounds": 1, "mab_seed": seed}
        job = make_job(sizes, sizes[len(sizes) // 2], policy=policy, beta_knob=beta, **terms)
        self.policy = find(policy)
        self.policy.check(job)
        self.job = InMemoryJob(job)
        self.random = random.Random(seed)  # noqa: S311 - chance, not secrecy
        self.rng = np.random.default_rng(seed)
        self.trials: dict[int, TrialRecord] = {}
        # Unknown to the policy: the sizes that fit, the epochs that each size needs, and the energy of an epoch.
        self.largest_that_fits = self.random.choice(sizes[len(sizes) // 2 :])
        self.needed = {size: self.random.choice([3, 5, 8, 12, 30]) for size in sizes}
        self.epoch_j = {size: self.random.uniform(10, 40) for size in sizes}

    def play(self, trials: int) -> list[int]:
        """Begin a number of trials, at most three at a time, and return the batch sizes that were chosen."""
        while len(self.trials) < trials:
            alive = self.job.history.in_flight
            if len(alive) == 3 or (alive and self.random.random() > 0.3):
                trial = self.go_on(self.random.choice(alive))
            else:
                self.check_replay()
                try:
                    self.check_decision()
                    trial = self.job.begin_trial(self.rng)
                except NoSurvivorError:
                    break
            self.trials[trial.trial_number] = trial
        return [trial.batch_size for trial in self.trials.values()]

    def check_decision(self) -> None:
        history, rng = self.job.history, copy.deepcopy(self.rng)
        suggestion = pure(self.policy.suggest, history, rng)
        assert self.policy.suggest(history, copy.deepcopy(self.rng)) == suggestion
        assert not history.runnable_sizes or suggestion.batch_size in history.runnable_sizes
        assert (suggestion.survivors is not None) is (suggestion.origin is Origin.BANDIT)
        assert suggestion.reason
        assert suggestion.bound is None or 1 <= suggestion.bound.epochs <= MAX_EPOCHS
        expected = pure(self.policy.expectations, replace(history, survivors=suggestion.survivors))
        plays_the_best = suggestion.origin is Origin.INCUMBENT or suggestion.reason.startswith("best so far")
        if plays_the_best and history.job.policy in OWN_POLICIES:  # others need not tell what they expect
            assert suggestion.batch_size == expected.best
        assert expected.best is None or expected.best in expected.costs
        assert set(expected.costs) <= set(history.job.batch_sizes)

    def go_on(self, trial: TrialRecord) -> TrialRecord:
        """Apply one random event, such as a report or a crash, to a trial in flight."""
        event = self.random.choices(["report", "failed", "suspended", "withdrawn"], [40, 1, 1, 0.5])[0]
        if trial.batch_size > self.largest_that_fits:
            event = "infeasible"
        elif event == "suspended" and trial.state is TrialState.SUSPENDED:
            event = "report"
        if event != "report":
            return self.job.end_trial(trial.trial_number, Ending.model_validate({"outcome": event}))
        size, epoch = trial.batch_size, trial.epoch + 1
        spent_j = self.epoch_j[size] * self.random.uniform(0.9, 1.1)
        metric = 1.0 if epoch >= self.needed[size] * self.random.uniform(0.8, 1.2) else 0.5
        assert 1 <= self.job.stop_rule(trial.trial_number).max_epochs <= MAX_EPOCHS
        report = Report(trial.time_s + spent_j / 100, trial.energy_j + spent_j, epoch, metric)
        return self.job.judge(trial.trial_number, report)[0]

    def check_replay(self) -> None:
        """Check that the job's history and its stored memory equal a replay of its trials."""
        history, survivors = self.job.history, self.job.state.survivors
        replayed: History = pure(replay, self.job.state.registration, list(self.trials.values()), survivors)
        # After the pruning stage, no decision needs the explorations.
        assert history == (replayed if survivors is None else replace(replayed, explorations=()))
        events = [max(trial.started_event, trial.ended_event or 0) for trial in self.trials.values()]
        assert (self.job.state.event_count, self.job.state.trial_count) == (max(events, default=0), len(self.trials))
        if self.policy.memory is not None:
            adapter: TypeAdapter[Any] = TypeAdapter(self.policy.memory.kind)
            assert adapter.validate_json(adapter.dump_json(history.memory)) == history.memory


def pure(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and check that it changes no argument except a generator, and no global generator."""
    checked = [each for each in arguments if not isinstance(each, np.random.Generator)]
    before, drawn = copy.deepcopy(checked), random.getstate()
    answer = function(*arguments)
    assert checked == before
    assert random.getstate() == drawn
    return answer
