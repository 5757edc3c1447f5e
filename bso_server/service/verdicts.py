"""The verdicts on jobs, which a server stores: lists of jobs, the report on all jobs, and metrics read many of them.

The end of a trial leaves the verdict on its job outdated. A server regularly computes the outdated verdicts, and a
bounded number of them before it reads verdicts.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from bso_server.core.gp_voi.run_costs import drift_of
from bso_server.core.model import MISSED, TrialRecord
from bso_server.core.policy import expectations
from bso_server.core.savings import Amounts, JobVerdict, Tally, completed_count, is_whole_run, savings
from bso_server.core.verdict import LEAST_CONTROLS, SMALL, Verdict
from bso_server.errors import ComputeFirstError, DatabaseUnavailableError
from bso_server.service.loading import is_unchanged, load
from bso_server.service.reading import stuck_advice, trial_states
from bso_server.service.savings import read_evidence
from bso_server.storage import queries
from bso_server.storage.queries import Judged
from bso_server.storage.rows import StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, CreatedJob, Origin, SavingsWord, TrialState

logger = logging.getLogger("bso_server")

# Trials of the jobs that are computed at once, in about half a second; a job counts as 20 trials more. A job with more
# trials is computed alone, within two seconds, because only its latest runs count.
_TRIALS_AT_ONCE = 600
_OF_A_JOB = 20
# Computations of one update.
_ROUNDS = 6
_JOBS_ON_A_PAGE = 500

# The last two runs are compared with earlier ones among this number of a job's latest events.
_COMPARED_EVENTS = 80


async def update(store: Store) -> int:
    """Compute a bounded number of outdated verdicts; return the number that remains. Raise as `Store.read`."""
    rounds, outdated = iter(range(_ROUNDS)), list[tuple[str, int]]()

    def look(transaction: Transaction) -> None:
        outdated[:] = queries.outdated_verdicts(transaction)
        if outdated and next(rounds, None) is not None:
            raise ComputeFirstError("verdicts are being computed", "verdicts", partial(_read, _some_of(outdated)))

    # If the database accepts no writes, the store has logged the error, and readers get the earlier verdicts.
    with suppress(DatabaseUnavailableError):
        await store.patient().read(look)
    return len(outdated)


async def update_all(store: Store) -> int:
    """Compute all outdated verdicts; return the number of those that cannot be computed."""
    before, left = math.inf, await update(store)
    while 0 < left < before:
        before, left = left, await update(store)
    return left


async def judged_jobs(store: Store, since: datetime | None = None) -> AsyncIterator[Sequence[Judged]]:
    """Yield all jobs in pages, each from a transaction of its own, so that other requests get their turn."""
    after = ""
    while page := await store.read(queries.judged_jobs, after=after, limit=_JOBS_ON_A_PAGE, since=since):
        yield page
        after = page[-1].job_id


def _some_of(outdated: list[tuple[str, int]]) -> list[str]:
    # At random, because several servers may update one database.
    secrets.SystemRandom().shuffle(outdated)
    chosen, trials = list[str](), 0
    for job_id, count in outdated:
        trials += count + _OF_A_JOB
        if chosen and trials > _TRIALS_AT_ONCE:
            break
        chosen.append(job_id)
    return sorted(chosen)


def _read(job_ids: Sequence[str], transaction: Transaction) -> Callable[[], Callable[[Transaction], None]]:
    """Read the facts behind verdicts; return as the argument `read` of `ComputeFirstError`."""
    jobs = [job for job in map(transaction.job, job_ids) if job is not None]
    work = [(job, verdict_on(transaction, job)) for job in jobs]

    def compute() -> Callable[[Transaction], None]:
        computed = []
        for job, verdict in work:
            try:
                computed.append((job, verdict()))
            except Exception:
                # A policy of another package may fail, which must not hide the verdicts on other jobs.
                logger.exception("could not compute the verdict on job %s", job.job_id)
        return partial(_save, computed)

    return compute


def _save(computed: Sequence[tuple[StoredJob, JobVerdict]], transaction: Transaction) -> None:
    for job, verdict in computed:
        if is_unchanged(transaction, job):
            transaction.save_verdict(job, verdict)


def verdict_on(transaction: Transaction, stored: StoredJob) -> Callable[[], JobVerdict]:
    """Read the facts behind the verdict on a job; return a function that computes it, without the database.

    Raise as `open_trials`.
    """
    job, loaded = stored.registration, load(transaction, stored)
    tallies = queries.tallies(transaction, stored.job_id)
    learned, found = read_evidence(transaction, stored, completed_count(tallies))
    since = max(stored.revised_event, stored.event_count - _COMPARED_EVENTS)
    latest = queries.completed_runs(transaction, stored.job_id, since=since)
    missed = {} if completed_count(tallies) else queries.missed_metrics(transaction, job)

    def compute() -> JobVerdict:
        history, _ = loaded.history()
        best, states = expectations(history).best, trial_states(tallies)
        stuck, drift = stuck_advice(history, missed), drift_of(job, latest)
        with learned.lock:
            learned.learn(found)
            judges = {name: learned.by[name].judge(best or job.default_batch_size) for name in Amounts._fields}
            view = savings(job, tallies, best, judges.__getitem__)
            bases = {name: judge.basis() for name, judge in judges.items()}
            advice = None if best is None else _advice(job, tallies, best, judges["cost_j"].verdict())
        has_missed = TrialState.COMPLETED not in states and not MISSED.isdisjoint(states)
        troubles = stuck is not None, has_missed, view.word is SavingsWord.LOSES, (drift or 0.0) > 0, True
        return JobVerdict(view, bases, stuck, drift, advice, troubles.index(True))

    return compute


def _advice(job: CreatedJob, tallies: Sequence[Tally], best: int, verdict: Verdict) -> str | None:
    """Return why a job saves nothing and what to do, in words; None if it saves, or may still be shown to."""
    default = job.default_batch_size
    at_default = [each for each in tallies if is_whole_run(each) and each.batch_size == default]
    evidence = [each.trials for each in at_default if not (each.other_gpus or each.origin is Origin.EXPLORATION)]
    if sum(evidence) < LEAST_CONTROLS - 1:
        return None
    if best == default:
        why = f"the default, {default}, is the best batch size"
    elif verdict.word is SavingsWord.LOSES and verdict.now is not None:
        why = f"{best} costs {verdict.now.in_words} more than the default, {default}"
    elif verdict.cause is not None and verdict.cause.startswith(SMALL):
        why = verdict.cause
    else:
        return None
    command = f"bso-server jobs revise {job.job_id} --batch-sizes {default}"
    return f"{why}: train at {default} alone ({command}), or offer other sizes"


def compared(transaction: Transaction, stored: StoredJob, trials: Sequence[TrialRecord]) -> list[tuple[str, Any, Any]]:
    """Return the fields of the stored verdict on a job, each with its name and the value by its trials.

    Return none if the verdict is outdated, or may include the end of a trial that has been revived.
    """
    kept = transaction.verdict(stored)
    if kept is None or any(
        (trial.ended_event or 0) > kept[0] or (trial.state in ALIVE and trial.started_event < kept[0])
        for trial in trials
    ):
        return []
    one, other = map(_plain, (kept[1], verdict_on(transaction, stored)()))
    return [(f"{name} of the stored verdict", value, other[name]) for name, value in one.items()]


def _plain(verdict: JobVerdict) -> dict[str, Any]:
    """Return all fields with rounded numbers, because databases add numbers in different orders."""
    text = TypeAdapter(JobVerdict).dump_json(verdict)
    plain = json.loads(text, parse_float=lambda number: f"{float(number):.6g}")
    return {**plain.pop("savings"), **plain}
