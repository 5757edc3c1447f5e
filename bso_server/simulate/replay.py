"""A job played anew under another η and β: ``python -m bso_server.simulate.replay``, a question in, an answer out.

A process of its own: what a policy computes for thousands of trials would hold the interpreter's lock against the
reports of a server's clients, and a process can be given less of the machine's time, bounded in memory, and killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from bso_server.errors import PolicyNotInstalledError
from bso_server.simulate.messages import Answer, Outcome, Question, Replayed
from bso_server.simulate.play import Conditions, Played
from bso_server.simulate.recorded import recorded_workload
from bso_server.simulate.results import Setting, landscape_of, played
from zeus_plugins.protocol import TrialState

RECURRENCES = 50
TIMES = 20
BUDGET_S = 15.0
"""Seconds after which no further job is played; the first one of each setting is played to its end."""

MAX_SIZES = 128
"""Batch sizes with runs, of which more would take too long."""

MAX_MEMORY_BYTES = 2**30
"""The address space of the process, where the system knows such a limit."""

# Recurrences that say which size a job has come to.
_LAST = 5


def answer(question: Question, clock: Callable[[], float] = time.monotonic) -> Answer:
    """Play the job as it is and under the other η and β in turn, until it was often enough, or for long enough."""
    try:
        return Answer(replayed=_replayed(question, clock))
    except (ValueError, PolicyNotInstalledError) as error:
        return Answer(refused=str(error))


def _replayed(question: Question, clock: Callable[[], float]) -> Replayed:
    job, end = question.job, clock() + BUDGET_S
    workload = recorded_workload(job, question.runs)
    if len(workload.sizes) > MAX_SIZES:
        raise ValueError(
            f"{len(workload.sizes)} batch sizes have runs, and a replay takes at most {MAX_SIZES}; bso-server simulate "
            "--job takes as many as there are"
        )
    settings = [
        Setting(recurrences=RECURRENCES, eta=eta, beta=beta, optimal_power_limits=False)
        for eta, beta in ((job.eta_knob, job.beta_knob), (question.eta, question.beta))
    ]
    conditions = [Conditions(landscape_of(workload, setting)) for setting in settings]
    jobs: list[tuple[Played, ...]] = []
    for seed in count():
        # The same draws for both.
        jobs.append(
            tuple(
                played(workload, condition, job.policy, setting, seed)
                for setting, condition in zip(settings, conditions, strict=True)
            )
        )
        if len(jobs) == TIMES or clock() > end:
            break
    default = conditions[0].landscape.default.expected_consumption
    own, other = (_outcome(setting, found) for setting, found in zip(settings, zip(*jobs, strict=True), strict=True))
    return Replayed(
        runs=len(question.runs),
        recurrences=RECURRENCES,
        times=len(jobs),
        default_batch_size=workload.default_batch_size,
        default_energy_j=None if default is None else default.energy_j * RECURRENCES,
        default_time_s=None if default is None else default.time_s * RECURRENCES,
        own=own,
        other=other,
    )


def _outcome(setting: Setting, jobs: Sequence[Played]) -> Outcome:
    spent = [consumed for job in jobs for consumed in job.consumed]
    states = Counter(trial.record.state for job in jobs for trial in job.trials)
    last = Counter(
        trial.record.batch_size
        for job in jobs
        for trial in job.trials
        if trial.record.state is TrialState.COMPLETED and trial.recurrence >= setting.recurrences - _LAST
    )
    size, runs = next(iter(last.most_common(1)), (None, 0))
    return Outcome(
        eta=setting.eta,
        beta=setting.beta,
        energy_j=sum(each.energy_j for each in spent) / len(jobs),
        time_s=sum(each.time_s for each in spent) / len(jobs),
        batch_size=size,
        share=runs / last.total() if runs else 0.0,
        stopped=states[TrialState.EARLY_STOPPED] / len(jobs),
    )


def main() -> None:
    """Answer the question on the standard input, as JSON, within bounds."""
    if hasattr(os, "nice"):
        # Some sandboxes refuse it, as that of deploy/systemd does; the other bounds hold all the same.
        with suppress(OSError):
            os.nice(10)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    question = Question.model_validate_json(sys.stdin.buffer.read())
    try:
        found = answer(question)
    except MemoryError:
        found = Answer(refused=f"it would take more than {MAX_MEMORY_BYTES / 2**30:g} GiB of memory")
    sys.stdout.write(found.model_dump_json())


if __name__ == "__main__":
    main()
