"""A job of a Zeus server as an export of ours, and what differs between the two; pure.

Zeus keeps of a trial how it ended and what it took by then, and nothing of its epochs. What it does not keep stays
unknown. What follows from the trials (the lowest cost, what is known of each size) is made anew and compared with what
Zeus has kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from pydantic import ValidationError

from bso_server.core.history import History
from bso_server.core.job import Moment
from bso_server.core.model import TrialRecord
from bso_server.core.registry import find
from bso_server.core.replay import replay
from bso_server.core.zeus.bandit import posteriors
from bso_server.errors import InvalidImportError
from bso_server.service.messages import ExportHead, TrialExport
from bso_server.service.transfer import ImportedJob
from bso_server.storage.zeus_database import ZeusJob, ZeusTrial
from zeus_plugins.protocol import ZEUS, EndReason, JobRegistration, Origin, TrialState

# Relative difference from which on two numbers, of which one follows from the other, are said to differ, by the digits
# that Zeus works with.
_TOLERANCES = {15: 1e-6, 6: 1e-5}

_ORIGINS = {"Exploration": Origin.EXPLORATION, "Concurrent": Origin.CONCURRENT, "MAB": Origin.BANDIT}

_UNTOLD = "Zeus keeps neither epochs nor metric"


@dataclass(frozen=True, slots=True)
class ZeusImport:
    """A job that can be imported.

    Attributes:
        head: The beginning of its export.
        trials: Its trials, in order of dispatch.
        min_cost_j: The lowest cost of one that reached the target, joules, or None.
        notes: Sentences for somebody who moves it.
    """

    head: ExportHead
    trials: tuple[TrialExport, ...]
    min_cost_j: float | None
    notes: tuple[str, ...]

    @property
    def states(self) -> Counter[TrialState]:
        """The number of trials in each state."""
        return Counter(trial.state for trial in self.trials)


def imported(
    source: ZeusJob,
    moment: Moment,
    *,
    zone: tzinfo | None,
    live_as: TrialState = TrialState.RUNNING,
    job_id: str | None = None,
) -> ZeusImport:
    """The job as it goes on here.

    Args:
        source: The job as Zeus keeps it.
        moment: The present, from which the leases of trials that run begin.
        zone: The time zone of the clock of Zeus's server; None: this machine's.
        live_as: RUNNING or ABANDONED, for trials whose end Zeus does not know.
        job_id: Its id here; None: the same.

    Raises:
        InvalidImportError: It cannot be a job of ours, or contradicts itself.
    """
    asked = _registration(source, job_id)
    registration = find(ZEUS).amended(asked)
    events = _Events(source.trials)
    trials, lowest_j = _trials(source, registration, events, moment, zone, live_as)
    has_bandit = any(trial.origin is Origin.BANDIT for trial in trials)
    survivors = tuple(arm.batch_size for arm in source.arms) if has_bandit else None
    try:
        head = ExportHead(
            job=registration,
            created_at=trials[0].started_at if trials else moment.now,
            survivors=survivors,
            rng_state=source.rng_state,
        )
    except ValidationError as error:
        raise _invalid(error) from error
    job = ImportedJob(head)
    records = [each.trial for each in job.take_all(trials)]
    job.close()
    history = replay(registration, records, survivors)
    notes = [
        *_about_window(asked, registration),
        *_about_live(records, live_as, moment),
        *_about_lowest(source, history, lowest_j),
        *(_about_arms(source, history) if has_bandit else ()),
    ]
    return ZeusImport(head, trials, None if history.cheapest is None else history.cheapest.cost_j, tuple(notes))


class _Events:
    """The events of a job's logical clock at which its trials began and ended.

    Trials began in the order of their numbers. By the clock of Zeus's server an end comes before what began at the same
    instant (MySQL keeps whole seconds), but after the beginning of its own trial.
    """

    def __init__(self, trials: tuple[ZeusTrial, ...]) -> None:
        self.started: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.order: list[ZeusTrial] = sorted(
            (trial for trial in trials if trial.ended is not None),
            key=lambda trial: (trial.ended or datetime.max, trial.trial_number),
        )
        waiting, event = list(self.order), 0
        for trial in trials:
            while (
                waiting
                and waiting[0].trial_number in self.started
                and (waiting[0].ended or trial.started) <= trial.started
            ):
                event += 1
                self.ended[waiting.pop(0).trial_number] = event
            event += 1
            self.started[trial.trial_number] = event
        for trial in waiting:
            event += 1
            self.ended[trial.trial_number] = event
        self.last = event


def _trials(
    source: ZeusJob,
    job: JobRegistration,
    events: _Events,
    moment: Moment,
    zone: tzinfo | None,
    live_as: TrialState,
) -> tuple[tuple[TrialExport, ...], float | None]:
    """The trials, and the lowest cost by Zeus's rule: of all trials that were measured to their end, joules."""
    verdicts: dict[int, tuple[TrialState, EndReason, str]] = {}
    lowest_j: float | None = None
    for trial in events.order:
        if trial.status == "Failed":
            verdicts[trial.trial_number] = TrialState.FAILED, EndReason.CRASHED, "failed on Zeus's server"
            continue
        if trial.time_s is None or trial.energy_j is None:
            raise InvalidImportError(f"trial {trial.trial_number} has ended as {trial.status} without time and energy")
        cost_j = job.cost_j(time_s=trial.time_s, energy_j=trial.energy_j)
        verdicts[trial.trial_number] = _verdict(job, trial, cost_j, lowest_j)
        lowest_j = cost_j if lowest_j is None else min(lowest_j, cost_j)

    def in_utc(instant: datetime) -> datetime:
        return (instant if zone is None else instant.replace(tzinfo=zone)).astimezone(UTC)

    found, last = [], events.last
    for trial in source.trials:
        number, origin, status = trial.trial_number, _ORIGINS.get(trial.type), trial.status
        if origin is None or status not in ("Dispatched", "Succeeded", "Failed"):
            raise InvalidImportError(f"trial {number} is {trial.type} and {status}, which Zeus 0.16 does not know")
        if (status == "Dispatched") is not (trial.ended is None):
            raise InvalidImportError(f"trial {number} is {status} and has{' no' * (trial.ended is None)} end")
        ended_at = None if trial.ended is None else in_utc(trial.ended)
        ended_event, lease_end = events.ended.get(number), None
        state, reason, message = verdicts.get(number, (live_as, None, f"{live_as} when it was imported from Zeus"))
        if ended_at is None and live_as is TrialState.ABANDONED:
            last += 1
            ended_at, ended_event, reason = moment.now, last, EndReason.LEASE_EXPIRED
        elif ended_at is None:
            unheard = TrialRecord(trial_number=number, batch_size=trial.batch_size, state=state, origin=origin)
            lease_end = moment.lease_end(unheard)
        is_measured = status == "Succeeded"
        try:
            found.append(
                TrialExport(
                    trial_number=number,
                    batch_size=trial.batch_size,
                    state=state,
                    origin=origin,
                    reason=f"chosen by Zeus's server ({trial.type})",
                    message=message,
                    started_at=in_utc(trial.started),
                    ended_at=ended_at,
                    end_reason=reason,
                    time_s=trial.time_s if is_measured else None,
                    energy_j=trial.energy_j if is_measured else None,
                    energy_source="imported from Zeus" if is_measured else None,
                    # More is not kept of a metric than that it was good enough.
                    metric=job.target_metric if state is TrialState.COMPLETED else None,
                    started_event=events.started[number],
                    reported_at=ended_at if is_measured else None,
                    ended_event=ended_event,
                    epoch=None,
                    report_count=1 if is_measured else 0,
                    longest_gap_s=0.0,
                    lease_expires_at=lease_end,
                    heartbeats=False,
                )
            )
        except ValidationError as error:
            raise _invalid(error, f"trial {number}: ") from error
    return tuple(found), lowest_j


def _verdict(
    job: JobRegistration, trial: ZeusTrial, cost_j: float, lowest_j: float | None
) -> tuple[TrialState, EndReason, str]:
    """The way in which a trial ended that was measured to its end, by the lowest cost at that time, joules."""
    if trial.converged:
        message = f"target reached at {cost_j:.4g} J; {_UNTOLD}"
        return TrialState.COMPLETED, EndReason.TARGET_REACHED, message
    if job.beta_knob is not None and lowest_j is not None and cost_j > job.beta_knob * lowest_j:
        message = f"stopped: {cost_j:.4g} J spent, more than {job.beta_knob:g} times {lowest_j:.4g} J; {_UNTOLD}"
        return TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED, message
    message = f"stopped without the target after {cost_j:.4g} J, within the cost bound, so at max_epochs; {_UNTOLD}"
    return TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED, message


def _registration(source: ZeusJob, job_id: str | None) -> JobRegistration:
    fields = {**source.specification, "policy": ZEUS}
    if job_id is not None:
        fields["job_id"] = job_id
        if not job_id.startswith(fields["job_id_prefix"]):
            fields["job_id_prefix"] = job_id
    try:
        return JobRegistration.model_validate(fields)
    except ValidationError as error:
        wrong = {str(line["loc"][0]) for line in error.errors() if line["loc"]}
        hint = ". Give it another id here: --job JOB --job-id NEW" if wrong & {"job_id", "job_id_prefix"} else ""
        raise _invalid(error, hint=hint) from error


def _invalid(error: ValidationError, place: str = "", hint: str = "") -> InvalidImportError:
    """The same as an error of the import."""
    said = "; ".join(f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors(include_url=False))
    return InvalidImportError(f"{place}{said}{hint}")


def _about_window(asked: JobRegistration, registration: JobRegistration) -> Iterator[str]:
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
            f"{minutes:g} min (--live-as abandoned: nobody trains any more)"
        )
    else:
        yield f"without an end: {', '.join(live)}; taken as abandoned, and a late report brings one back"


def _about_lowest(source: ZeusJob, history: History, lowest_j: float | None) -> Iterator[str]:
    """The difference between the lowest cost that Zeus keeps, the one by its own rule, and the one that counts here."""
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
    found = posteriors(history, [arm.batch_size for arm in source.arms if arm.batch_size in history.arms])
    for arm in source.arms:
        ours = found.get(arm.batch_size)
        if ours is None:
            continue
        if ours.observations != arm.num_observations or _differ(source, arm.param_mean, ours.mean):
            yield (
                f"batch size {arm.batch_size}: Zeus keeps a mean cost of {_joules(-arm.param_mean)} over "
                f"{arm.num_observations} runs, and its trials say {_joules(-ours.mean)} over {ours.observations}"
            )


def _differ(source: ZeusJob, one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return not math.isclose(one, other, rel_tol=_TOLERANCES[source.digits])


def _joules(cost_j: float | None) -> str:
    return "none" if cost_j is None else f"{cost_j:.8g} J"
