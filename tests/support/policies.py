"""Random lives of a job, whose decisions are compared with what the server requires of a policy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from bso_server.core.job import (
    NO_CRASHES,
    JobState,
    dispatch_trial,
    end_by_training,
    end_trial,
    judge_report,
    replay,
    revive_trial,
)
from bso_server.core.model import History, Report, Suggestion, TrialRecord
from bso_server.core.policy import find, installed, memory_after, needs_bound
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import ALIVE, CreatedJob, Ending, EndReason, Origin, TrialState

T = TypeVar("T")

MAX_EPOCHS = 20
SIZES = ((32,), (8, 16, 32, 64, 128), tuple(range(8, 520, 8)))
"""The batch sizes of the jobs, by seed."""


def check_policy(policy: str, *, seeds: Iterable[int], trials: int = 40) -> None:
    """Play each job twice, and compare the decisions with each other and with the requirements."""
    installed(policy)
    for seed in seeds:
        assert PlayedJob(policy, seed).play(trials) == PlayedJob(policy, seed).play(trials)


class PlayedJob:
    """A job, and random events of its trials."""

    def __init__(self, policy: str, seed: int) -> None:
        sizes = SIZES[seed % len(SIZES)]
        fields: dict[str, Any] = {"beta_knob": None if seed % 4 == 3 else 2.0, "policy": policy, "mab_seed": seed}
        fields |= {"max_power": 100.0, "number_of_gpus": 1, "gpu_model": "GPU", "num_pruning_rounds": 1}
        fields |= {"job_id_prefix": "job", "job_id": "job", "batch_sizes": sizes, "max_epochs": MAX_EPOCHS}
        self.job = CreatedJob(**fields, default_batch_size=sizes[len(sizes) // 2], eta_knob=1.0, target_metric=0.9)
        self.policy = find(policy)
        self.policy.check(self.job)
        self.random = random.Random(seed)  # noqa: S311 - chance, not secrecy
        self.rng = np.random.default_rng(seed)
        self.trials: list[TrialRecord] = []
        self.state = JobState(registration=self.job, bandit_entered_at=replay(self.job, ()).bandit_entered_at)
        self.memory = self.policy.begun_memory(self.job)
        # Unknown to the policy: the sizes that fit, the epochs that each size needs, and the energy of an epoch.
        self.largest_that_fits = self.random.choice(sizes[len(sizes) // 2 :])
        self.needed = {size: self.random.choice([3, 5, 8, 12, 30]) for size in sizes}
        self.epoch_j = {size: self.random.uniform(10, 40) for size in sizes}

    def play(self, trials: int) -> list[int]:
        """Begin a number of trials, at most three at a time, and return the batch sizes that the policy chose."""
        chosen: list[int] = []
        while len(self.trials) < trials:
            alive = [trial for trial in self.trials if trial.state in {*ALIVE, TrialState.ABANDONED}]
            if len(alive) == 3 or (alive and self.random.random() > 0.3):
                self.go_on(self.random.choice(alive))
            elif self.random.random() < 0.05:
                self.dispatch(Suggestion(self.random.choice(self.job.batch_sizes), Origin.OFFLINE, "without a server"))
            else:
                try:
                    suggestion = self.suggested()
                except NoSurvivorError:
                    break
                self.dispatch(suggestion)
                chosen.append(suggestion.batch_size)
        return chosen

    def suggested(self) -> Suggestion:
        history = replay(self.job, self.trials, self.state.survivors)
        self.learn(history)
        before = copy.deepcopy(self.rng)
        suggestion = pure(self.policy.suggest, history, self.rng)
        assert self.policy.suggest(history, before) == suggestion
        assert not history.runnable_sizes or suggestion.batch_size in history.runnable_sizes
        assert (suggestion.survivors is not None) is (suggestion.origin is Origin.BANDIT)
        assert suggestion.reason
        assert suggestion.bound is None or 1 <= suggestion.bound.epochs <= MAX_EPOCHS
        expected = pure(self.policy.expectations, history)
        assert expected.best is None or expected.best in expected.costs
        assert set(expected.costs) <= set(self.job.batch_sizes)
        return suggestion

    def dispatch(self, suggestion: Suggestion) -> None:
        self.state, trial = dispatch_trial(self.state, suggestion)
        self.trials.append(trial)

    def go_on(self, trial: TrialRecord) -> None:
        """Apply one random event, such as a report or a crash, to a trial that has not ended."""
        event = self.random.choices(["report", "failed", "suspended", "silent", "withdrawn"], [40, 1, 1, 1, 0.5])[0]
        if trial.batch_size > self.largest_that_fits:
            event = "infeasible"
        if event == "report":
            trial = self.reported(trial)
        elif event == "silent" and trial.state is TrialState.RUNNING:
            self.state, trial = end_trial(self.state, trial, TrialState.ABANDONED, EndReason.LEASE_EXPIRED, "silent")
        elif event != "silent":
            ending = Ending.model_validate({"outcome": event})
            earlier = NO_CRASHES.including(self.trials)
            self.state, trial = end_by_training(self.state, trial, ending, earlier=earlier, retries=3)
        self.trials[trial.trial_number - 1] = trial

    def reported(self, trial: TrialRecord) -> TrialRecord:
        size, epoch = trial.batch_size, trial.epoch + 1
        spent_j = self.epoch_j[size] * self.random.uniform(0.9, 1.1)
        metric = 1.0 if epoch >= self.needed[size] * self.random.uniform(0.8, 1.2) else 0.5
        report = Report(trial.time_s + spent_j / 100, trial.energy_j + spent_j, epoch, metric)
        running = revive_trial(trial)
        history = replay(self.job, self.trials, self.state.survivors) if needs_bound(self.job, running) else None
        assert 1 <= self.policy.stop_rule(self.job, running, self.state.min_cost_j).max_epochs <= MAX_EPOCHS
        self.state, trial, _ = judge_report(self.state, running, report, history=history)
        return trial

    def learn(self, history: History) -> None:
        """Update the memory with the trials that have ended since the last decision, as the server does."""
        if self.policy.memory is None:
            return
        ended = [trial for trial in self.trials if (trial.ended_event or 0) > self.state.folded_event]
        for trial in sorted(ended, key=lambda trial: trial.ended_event or 0):
            self.memory = pure(memory_after, self.job, self.memory, [trial])
        adapter: TypeAdapter[Any] = TypeAdapter(self.policy.memory.kind)
        assert adapter.validate_json(adapter.dump_json(self.memory)) == self.memory
        assert history.memory == self.memory, "a replay of all trials makes another memory"


def pure(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and check that it changes no argument except a generator, and no global generator."""
    checked = [each for each in arguments if not isinstance(each, np.random.Generator)]
    before, drawn = copy.deepcopy(checked), random.getstate()
    answer = function(*arguments)
    assert checked == before
    assert random.getstate() == drawn
    return answer
