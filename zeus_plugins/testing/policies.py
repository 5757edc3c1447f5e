"""The conformance suite of policies: simulated jobs, decided by the policy under test.

The server's core keeps the jobs in memory; `zeus_plugins.testing` imports this module on use.
"""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

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
from bso_server.core.policy import Policy, find, given, installed, memory_after, needs_bound
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import ALIVE, CreatedJob, Decision, Ending, EndReason, Origin, TrialState

T = TypeVar("T")

_NAME = "under-test"
_MAX_EPOCHS = 20
_TARGET = 0.9
# The batch sizes of the jobs, by seed.
_SIZES = ((32,), (8, 16, 32, 64, 128), tuple(range(8, 520, 8)))
_CONCURRENCY = 3
# A memory may grow by digits and by batch sizes, but not with every trial.
_LEAST_JSON_BYTES = 2048
_GROWTH = 1.5
_MAX_REASON_LENGTH = 10_000


def check(policy: str | Policy, seeds: Iterable[int], trials: int, limit_s: float) -> None:
    """Check a policy; see `zeus_plugins.testing.check_policy`."""
    with ExitStack() as stack:
        name = policy if isinstance(policy, str) else stack.enter_context(given(_NAME, policy))
        installed(name)
        for seed in seeds:
            chosen = [_PlayedJob(name, seed, limit_s).play(trials) for _ in range(2)]
            if chosen[0] != chosen[1]:
                raise AssertionError(
                    f"seed {seed}: the same job was given other batch sizes when it lived again: decisions may depend "
                    "on nothing but the history and the generator"
                )


def _job(policy: str, seed: int) -> CreatedJob:
    sizes = _SIZES[seed % len(_SIZES)]
    return CreatedJob(
        job_id_prefix="job",
        job_id="job",
        batch_sizes=sizes,
        default_batch_size=sizes[len(sizes) // 2],
        eta_knob=1.0,
        beta_knob=None if seed % 4 == 3 else 2.0,
        target_metric=_TARGET,
        max_epochs=_MAX_EPOCHS,
        num_pruning_rounds=1,
        mab_seed=seed,
        policy=policy,
        max_power=100.0,
        number_of_gpus=1,
        gpu_model="GPU",
    )


class _PlayedJob:
    """A job, and random events of its trials."""

    def __init__(self, policy: str, seed: int, limit_s: float) -> None:
        self._seed, self._limit_s = seed, limit_s
        self._job = _job(policy, seed)
        self._policy = find(policy)
        self._policy.check(self._job)
        self._random = random.Random(seed)  # nosec B311  # noqa: S311 - chance, not secrecy
        self._rng = np.random.default_rng(seed)
        self._state = JobState.after((), self._replayed([], None))
        self._trials: list[TrialRecord] = []
        self._memory = self._policy.begun_memory(self._job)
        self._json_bytes: list[int] = []
        # Unknown to the policy: the sizes that fit, the epochs that each size needs, and the energy of an epoch.
        self._largest_that_fits = self._random.choice(self._job.batch_sizes[len(self._job.batch_sizes) // 2 :])
        self._needed = {size: self._random.choice([3, 5, 8, 12, 30]) for size in self._job.batch_sizes}
        self._epoch_j = {size: self._random.uniform(10, 40) for size in self._job.batch_sizes}

    def play(self, trials: int) -> list[int]:
        """Begin a number of trials, and return the batch sizes that the policy chose."""
        chosen: list[int] = []
        while len(self._trials) < trials:
            alive = [trial for trial in self._trials if trial.state in {*ALIVE, TrialState.ABANDONED}]
            if len(alive) < _CONCURRENCY and (not alive or self._random.random() < 0.3):
                if self._random.random() < 0.05:
                    offline = self._random.choice(self._job.batch_sizes)
                    self._dispatch(Suggestion(offline, Origin.OFFLINE, "began without the server"))
                elif (size := self._begin()) is not None:
                    chosen.append(size)
                else:
                    break
            else:
                self._go_on(self._random.choice(alive))
        self._check_growth()
        return chosen

    def _begin(self) -> int | None:
        """Begin the trial that the policy suggests; return None if no batch size can run."""
        history = self._replayed(self._trials, self._state.survivors)
        self._learn(history)
        before = copy.deepcopy(self._rng)
        try:
            suggestion = self._pure(self._policy.suggest, history, self._rng)
        except NoSurvivorError as error:
            runnable = sorted(history.runnable_sizes)
            if runnable and not self._policy.prunes:
                raise self._fault(f"NoSurvivorError, and {runnable} can run: suggest one of them") from error
            return None
        again = self._call(self._policy.suggest, history, before)
        if again != suggestion:
            raise self._fault(
                f"the same history and generator gave {suggestion} and then {again}: draw only from the generator"
            )
        self._check(suggestion, history)
        self._check_views(history, suggestion)
        self._dispatch(suggestion)
        return suggestion.batch_size

    def _dispatch(self, suggestion: Suggestion) -> None:
        self._state, trial = dispatch_trial(self._state, suggestion)
        self._trials.append(trial)

    def _go_on(self, trial: TrialRecord) -> None:
        """Apply one random event, such as a report or a crash, to a trial that has not ended."""
        event = self._random.choices(["report", "crash", "preempted", "silent", "refused"], [40, 1, 1, 1, 0.5])[0]
        if trial.batch_size > self._largest_that_fits:
            event = "memory"
        if event == "report":
            self._report(trial)
            return
        if event == "silent" and trial.state is TrialState.RUNNING:
            self._state, trial = end_trial(
                self._state, trial, TrialState.ABANDONED, EndReason.LEASE_EXPIRED, "not heard of"
            )
        elif event != "silent":
            outcomes = {"memory": TrialState.INFEASIBLE, "preempted": TrialState.SUSPENDED}
            outcomes["refused"] = TrialState.WITHDRAWN
            ending = Ending.model_validate({"outcome": outcomes.get(event, TrialState.FAILED)})
            earlier = NO_CRASHES.including(self._trials)
            self._state, trial = end_by_training(self._state, trial, ending, earlier=earlier, retries=3)
        self._trials[trial.trial_number - 1] = trial

    def _report(self, trial: TrialRecord) -> None:
        size, epoch = trial.batch_size, trial.epoch + 1
        spent_j = self._epoch_j[size] * self._random.uniform(0.9, 1.1)
        metric = 1.0 if epoch >= self._needed[size] * self._random.uniform(0.8, 1.2) else 0.5
        report = Report(trial.time_s + spent_j / 100, trial.energy_j + spent_j, epoch, metric)
        running, history = revive_trial(trial), None
        if needs_bound(self._job, running):
            history = self._replayed(self._trials, self._state.survivors)
        rule = self._call(self._policy.stop_rule, self._job, running, self._state.min_cost_j)
        self._check_epochs(rule.max_epochs)
        self._state, trial, _ = self._call(judge_report, self._state, running, report, history=history)
        if trial.epoch_bound is not None:
            self._check_epochs(trial.epoch_bound)
        self._trials[trial.trial_number - 1] = trial

    def _learn(self, history: History) -> None:
        """Update the memory with the trials that have ended since the last decision, as the server does."""
        kept, since = self._policy.memory, self._state.folded_event
        if kept is None:
            return
        ended = [trial for trial in self._trials if (trial.ended_event or 0) > since]
        for trial in sorted(ended, key=lambda trial: trial.ended_event or 0):
            self._memory = self._pure(memory_after, self._job, self._memory, [trial])
        adapter: TypeAdapter[Any] = TypeAdapter(kept.kind)
        text = adapter.dump_json(self._memory)
        try:
            is_read_back = adapter.validate_json(text) == self._memory
        except ValidationError:
            is_read_back = False
        if not is_read_back:
            raise self._fault(f"the memory is not read back from its JSON as it was: {self._memory}")
        if history.memory != self._memory:
            raise self._fault(
                f"a replay of all trials makes the memory {history.memory}, and trial by trial it became {self._memory}"
            )
        self._json_bytes.append(len(text))

    def _check_growth(self) -> None:
        """Check that decisions do not become slower, because the memory grows with the number of trials."""
        if len(self._json_bytes) < 4:
            return
        middle, end = self._json_bytes[len(self._json_bytes) // 2], self._json_bytes[-1]
        per_size = 64 * len(self._job.batch_sizes)
        if not (end <= max(_GROWTH * middle, middle + _LEAST_JSON_BYTES + per_size)):
            raise self._fault(
                f"the memory grew from {middle} to {end} bytes of JSON in the second half of the trials: keep summaries"
            )

    def _check(self, suggestion: Suggestion, history: History) -> None:
        size, origin = suggestion.batch_size, suggestion.origin
        if history.runnable_sizes and size not in history.runnable_sizes:
            raise self._fault(f"{size} was suggested, and {sorted(history.runnable_sizes)} can run")
        if not 0 < len(suggestion.reason) <= _MAX_REASON_LENGTH or "\0" in suggestion.reason:
            raise self._fault(f"a reason is a sentence, not {suggestion.reason!r}")
        if origin is Origin.OFFLINE:
            raise self._fault("trials of origin offline were not suggested by a policy")
        is_bandit = origin is Origin.BANDIT
        if (suggestion.survivors is not None) is not is_bandit:
            raise self._fault("survivors go with trials of origin bandit: both or neither")
        if is_bandit and not self._policy.prunes:
            raise self._fault("origin bandit ends a pruning stage: say prunes=True")
        if suggestion.bound is not None:
            self._check_epochs(suggestion.bound.epochs)

    def _check_views(self, history: History, suggestion: Suggestion) -> None:
        """Check the policy's expectations and explanation."""
        expected = self._pure(self._policy.expectations, history)
        costs = [cost.mean_j for cost in expected.costs.values()]
        if not set(expected.costs) <= set(self._job.batch_sizes):
            raise self._fault("costs are expected of unknown sizes")
        if not all(0 <= cost < math.inf for cost in costs):
            raise self._fault(f"expected costs are {costs}")
        if expected.best is not None and expected.best not in expected.costs:
            raise self._fault("no cost is expected of the best")
        if self._policy.explain is not None:
            decision = self._pure(self._policy.explain, history, suggestion)
            if not isinstance(decision, Decision):
                raise self._fault(f"explain gives a Decision, not {decision!r}")

    def _check_epochs(self, epochs: int) -> None:
        if not 1 <= epochs <= _MAX_EPOCHS:
            raise self._fault(f"a trial of {_MAX_EPOCHS} epochs is to be stopped after {epochs}")

    def _pure(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and check that it changes none of its arguments except a generator."""
        checked = [each for each in arguments if not isinstance(each, np.random.Generator)]
        before, state = copy.deepcopy(checked), (random.getstate(), _numpy_state())
        answer = self._call(function, *arguments)
        if checked != before:
            raise self._fault(f"{function.__name__} has changed its arguments: make new values")
        if (random.getstate(), _numpy_state()) != state:
            raise self._fault(f"{function.__name__} has drawn from a global generator: draw only from its argument")
        return answer

    def _call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function within the time limit."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(function(*arguments, **named))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if thread.is_alive():
            raise self._fault(f"{function.__name__} takes more than {self._limit_s:g} s")
        if errors:
            raise errors[0]
        return answers[0]

    def _replayed(self, trials: list[TrialRecord], survivors: tuple[int, ...] | None) -> History:
        return self._call(replay, self._job, trials, survivors)

    def _fault(self, fault: str) -> AssertionError:
        place = f"seed {self._seed}, {len(self._job.batch_sizes)} batch sizes, trial {len(self._trials) + 1}"
        return AssertionError(f"{place}: {fault}")


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of NumPy's global generator."""
    state: Any = np.random.get_state(legacy=True)
    return state[0], state[1].tobytes(), *state[2:]
