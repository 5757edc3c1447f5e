"""Conversion of a Zeus server's job into an export of ours, with notes about differences; pure.

Zeus keeps the end and the totals of a trial but not its epochs, which stay unknown. The lowest cost and the arms are
derived from the trials again and compared with Zeus's values.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from bso_server.core.job import Moment, replay
from bso_server.core.model import History, TrialRecord
from bso_server.core.policy import find
from bso_server.core.zeus import posteriors
from bso_server.errors import InvalidImportError
from bso_server.service.imports import ImportedJob, ImportedTrial, JobInImport, read, refusal
from bso_server.storage.zeus_database import ZeusJob
from zeus_plugins.protocol import ZEUS, CreatedJob, EndReason, Origin, TrialState

# Relative difference from which on two numbers count as different, by the number of digits that Zeus's database keeps.
_TOLERANCES = {15: 1e-6, 6: 1e-5}

_ORIGINS = {"Exploration": Origin.EXPLORATION, "Concurrent": Origin.CONCURRENT, "MAB": Origin.BANDIT}

_UNTOLD = "Zeus keeps neither epochs nor metric"
_WHEN = "when it was imported from Zeus"


@dataclass(frozen=True, slots=True)
class ZeusImport:
    """A job that can be imported.

    Attributes:
        job: The first line of the export.
        trials: The other lines, in order of dispatch.
        min_cost_j: The lowest cost of a trial that reached the target, joules, or None.
        notes: Sentences for the operator who moves the job.
    """

    job: ImportedJob
    trials: tuple[ImportedTrial, ...]
    min_cost_j: float | None
    notes: tuple[str, ...]

    @property
    def states(self) -> Counter[TrialState]:
        """The number of trials in each state."""
        return Counter(trial.state for trial in self.trials)


class _ZeusTrial(BaseModel):
    """A row of Zeus's `Trial`: instants in the time zone of Zeus's server; seconds and joules.

    `time_s`, `energy_j` and `converged` are None unless a training reported the trial's end.
    """

    number: int = Field(alias="trial_number")
    batch_size: int
    type: Literal["Exploration", "Concurrent", "MAB"]
    status: Literal["Dispatched", "Succeeded", "Failed"]
    started: datetime = Field(alias="start_timestamp")
    ended: datetime | None = Field(alias="end_timestamp")
    time_s: float | None = Field(alias="time")
    energy_j: float | None = Field(alias="energy")
    converged: bool | None

    @property
    def place(self) -> str:
        return f"trial {self.number}"

    @model_validator(mode="after")
    def _ended_as_its_status_says(self) -> Self:
        if (self.status == "Dispatched") is not (self.ended is None):
            raise ValueError(f"it is {self.status} and has {'no' if self.ended is None else 'an'} end")
        if self.status == "Succeeded" and (self.time_s is None or self.energy_j is None):
            raise ValueError(f"it has ended as {self.status} without time and energy")
        return self


class _End(NamedTuple):
    event: int
    state: TrialState
    reason: EndReason
    message: str


def imported(
    source: ZeusJob,
    moment: Moment,
    *,
    zone: tzinfo | None,
    live_as: TrialState = TrialState.RUNNING,
    job_id: str | None = None,
) -> ZeusImport:
    """Return the job for an import.

    Args:
        source: The job in Zeus's database.
        moment: The present, at which the leases of running trials begin.
        zone: The time zone of Zeus's server, or None for this machine's.
        live_as: RUNNING or ABANDONED, the state of trials without an end.
        job_id: The job's new id, or None to keep it.

    Raises:
        InvalidImportError: The job is invalid here, or contradicts itself.
    """
    asked = _registration(source, job_id)
    registration = find(ZEUS).amended(asked)
    rows = [read(_ZeusTrial, dict(row), f"trial {row['trial_number']}") for row in source.trials]
    started, ended = _events(rows)
    ends, lowest_j = _ends(registration, {row.number: row for row in rows}, ended)
    if live_as is TrialState.ABANDONED:
        for event, row in enumerate((row for row in rows if row.ended is None), len(started) + len(ended) + 1):
            ends[row.number] = _End(event, live_as, EndReason.LEASE_EXPIRED, f"{live_as} {_WHEN}")

    def in_utc(instant: datetime) -> datetime:
        return (instant if zone is None else instant.replace(tzinfo=zone)).astimezone(UTC)

    has_bandit = any(row.type == "MAB" for row in rows)
    survivors = tuple(arm["batch_size"] for arm in source.arms) if has_bandit else None
    head = {
        "job": registration,
        "created_at": in_utc(rows[0].started) if rows else moment.now,
        "survivors": survivors,
        "rng_state": source.rng_state,
        "trials": len(rows),
    }
    job = JobInImport("job", head, moment.now)
    trials, records = [], []
    for row in rows:
        facts = _UNKNOWN | {
            "trial_number": row.number,
            "batch_size": row.batch_size,
            "origin": _ORIGINS[row.type],
            "reason": f"chosen by Zeus's server ({row.type})",
            "started_at": in_utc(row.started),
            "started_event": started[row.number],
            "state": TrialState.RUNNING,
            "message": f"{TrialState.RUNNING} {_WHEN}",
        }
        if (end := ends.get(row.number)) is None:
            facts["lease_expires_at"] = moment.lease_end(TrialRecord.of_row(facts))
        else:
            facts |= _facts_of_ended(row, end, moment.now if row.ended is None else in_utc(row.ended), registration)
        trials.append(
            read(ImportedTrial, facts, row.place, job=registration, sizes=frozenset(registration.batch_sizes))
        )
        records.append(job.add(trials[-1], row.place).trial)
    job.close()
    history = replay(registration, records, survivors)
    notes = [
        *_about_window(asked, registration),
        *_about_live(records, live_as, moment),
        *_about_lowest(source, history, lowest_j),
        *(_about_arms(source, history) if has_bandit else ()),
    ]
    min_cost_j = None if history.cheapest is None else history.cheapest.cost_j
    return ZeusImport(job.export, tuple(trials), min_cost_j, tuple(notes))


def _events(rows: Sequence[_ZeusTrial]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the events of the job's logical clock at which its trials began and ended, each by trial, in order.

    Trials began in the order of their numbers. An end comes before other trials' begins at the same instant (MySQL
    keeps whole seconds), and after the start of its own trial.
    """
    started: dict[int, int] = {}
    ended: dict[int, int] = {}
    ends = deque(sorted((row.ended, row.number) for row in rows if row.ended is not None))
    for row in rows:
        while ends and ends[0][1] in started and ends[0][0] <= row.started:
            ended[ends.popleft()[1]] = len(started) + len(ended) + 1
        started[row.number] = len(started) + len(ended) + 1
    for _, number in ends:
        ended[number] = len(started) + len(ended) + 1
    return started, ended


def _ends(
    job: CreatedJob, rows: Mapping[int, _ZeusTrial], ended: Mapping[int, int]
) -> tuple[dict[int, _End], float | None]:
    """Return the ends by trial, and the lowest cost in joules by Zeus's rule: of all trials measured to their end."""
    ends: dict[int, _End] = {}
    lowest_j: float | None = None
    for number, event in ended.items():
        row = rows[number]
        if row.status == "Failed":
            ends[number] = _End(event, TrialState.FAILED, EndReason.CRASHED, "failed on Zeus's server")
            continue
        cost_j = job.cost_j(time_s=row.time_s or 0.0, energy_j=row.energy_j or 0.0)
        ends[number] = _End(event, *_verdict(job, row, cost_j, lowest_j))
        lowest_j = cost_j if lowest_j is None else min(lowest_j, cost_j)
    return ends, lowest_j


def _verdict(
    job: CreatedJob, row: _ZeusTrial, cost_j: float, lowest_j: float | None
) -> tuple[TrialState, EndReason, str]:
    """Return the state, reason and message of a trial that was measured to its end, by the lowest cost before it."""
    if row.converged:
        message = f"target reached at {cost_j:.4g} J; {_UNTOLD}"
        return TrialState.COMPLETED, EndReason.TARGET_REACHED, message
    if job.beta_knob is not None and lowest_j is not None and cost_j > job.beta_knob * lowest_j:
        message = f"stopped: {cost_j:.4g} J spent, more than {job.beta_knob:g} times {lowest_j:.4g} J; {_UNTOLD}"
        return TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED, message
    message = f"stopped without the target after {cost_j:.4g} J, within the cost bound, so at max_epochs; {_UNTOLD}"
    return TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED, message


# The fields that Zeus does not keep, or that a trial without a measurement lacks.
_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("ended_at", "end_reason", "ended_event", "lease_expires_at")),
    **dict.fromkeys(("time_s", "energy_j", "energy_source", "metric", "epoch", "reported_at")),
    "report_count": 0,
    "longest_gap_s": 0.0,
    "heartbeats": False,
}


def _facts_of_ended(row: _ZeusTrial, end: _End, ended_at: datetime, job: CreatedJob) -> dict[str, Any]:
    facts = {
        "state": end.state,
        "message": end.message,
        "end_reason": end.reason,
        "ended_at": ended_at,
        "ended_event": end.event,
        # Zeus does not keep the metric, only that it reached the target.
        "metric": job.target_metric if end.state is TrialState.COMPLETED else None,
    }
    if row.status == "Succeeded":
        facts |= {
            "time_s": row.time_s,
            "energy_j": row.energy_j,
            "energy_source": "imported from Zeus",
            "reported_at": ended_at,
            "report_count": 1,
        }
    return facts


def _registration(source: ZeusJob, job_id: str | None) -> CreatedJob:
    fields = {**source.specification, "policy": ZEUS}
    if job_id is not None:
        fields["job_id"] = job_id
        if not job_id.startswith(fields["job_id_prefix"]):
            fields["job_id_prefix"] = job_id
    try:
        return CreatedJob.model_validate(fields)
    except ValidationError as error:
        wrong = {str(line["loc"][0]) for line in error.errors() if line["loc"]}
        hint = ". Give it another id here: --job JOB --job-id NEW" if wrong & {"job_id", "job_id_prefix"} else ""
        raise InvalidImportError(f"{refusal(error)}{hint}") from error


def _about_window(asked: CreatedJob, registration: CreatedJob) -> Iterator[str]:
    if asked != registration:
        yield (
            f"window_size is {registration.window_size} and not {asked.window_size}, which could never hold "
            f"mab_num_explorations ({asked.mab_num_explorations}); clients that register it as before find it"
        )


def _about_live(trials: list[TrialRecord], live_as: TrialState, moment: Moment) -> Iterator[str]:
    live = [str(trial.trial_number) for trial in trials if trial.state in (TrialState.RUNNING, TrialState.ABANDONED)]
    if not live:
        return
    if live_as is TrialState.RUNNING:
        minutes = moment.leases.silent_lease_s / 60
        yield (
            f"without an end: {', '.join(live)}; taken as running, so that their trainings may report here within "
            f"{minutes:g} min (--live-as abandoned: no training is running any more)"
        )
    else:
        yield f"without an end: {', '.join(live)}; taken as abandoned, and a late report brings one back"


def _about_lowest(source: ZeusJob, history: History, lowest_j: float | None) -> Iterator[str]:
    """Compare the lowest cost in Zeus's database with the costs by Zeus's rule and by ours."""
    ours_j = None if history.cheapest is None else history.cheapest.cost_j
    if not _differ(source, source.min_cost_j, ours_j):
        return
    if _differ(source, source.min_cost_j, lowest_j):
        yield f"lowest cost: Zeus keeps {_joules(source.min_cost_j)}, and its trials say {_joules(lowest_j)}"
    else:
        yield (
            f"lowest cost: {_joules(source.min_cost_j)} in Zeus, of a run that missed the target, and "
            f"{_joules(ours_j)} here, where only runs that reached it count: from now on the two may decide differently"
        )


def _about_arms(source: ZeusJob, history: History) -> Iterator[str]:
    kept = {arm["batch_size"]: (arm["num_observations"], arm["param_mean"]) for arm in source.arms}
    for size, ours in posteriors(history, [size for size in kept if size in history.arms]).items():
        number, mean = kept[size]
        if ours.observations != number or _differ(source, mean, ours.mean):
            yield (
                f"batch size {size}: Zeus keeps a mean cost of {_joules(-mean)} over {number} runs, and its trials say "
                f"{_joules(-ours.mean)} over {ours.observations}"
            )


def _differ(source: ZeusJob, one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return not math.isclose(one, other, rel_tol=_TOLERANCES[source.digits])


def _joules(cost_j: float | None) -> str:
    return "none" if cost_j is None else f"{cost_j:.8g} J"
