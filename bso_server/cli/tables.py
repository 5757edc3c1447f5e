"""Jobs and tokens as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from bso_server.core.access import TokenRecord
from zeus_plugins.protocol import Explanation, JobList, JobSummary, JobView, TrialView


def job_list_text(jobs: JobList) -> str:
    """A table with a line per job."""
    if not jobs.jobs:
        return "no jobs"
    # A server that asks for no tokens has nothing to say there.
    owned = any(job.owner for job in jobs.jobs)
    rows = [
        [
            *(job.job_id, job.policy, str(job.trials), _number(job.min_cost_j), _text(job.min_cost_batch_size)),
            *([_owner(job)] if owned else []),
        ]
        for job in jobs.jobs
    ]
    header = ["JOB", "POLICY", "TRIALS", "LOWEST COST J", "AT BATCH SIZE", *(["TOKEN"] if owned else [])]
    return table(header, rows)


def job_text(view: JobView, *, verbose: bool = False) -> str:
    """The job's standing, a table of its arms and one of its trials.

    `verbose` adds the trials' epoch bounds and their reasons.
    """
    count = len(view.trials) if view.trial_count is None else view.trial_count
    states = ", ".join(f"{number} {state}" for state, number in view.trial_states.items())
    head = (
        f"job {view.job.job_id}: {view.stage} stage, {count} trials{f' ({states})' if states else ''}, "
        f"{_best(view)}{f', token {_owner(view)}' if view.owner else ''}"
    )
    arms = table(
        ["BATCH SIZE", "TRIALS", "REACHED TARGET", "MEAN COST J", "STD J", "EXPECTED COST J"],
        [
            [
                *(str(arm.batch_size), str(arm.trials), str(arm.n), _number(arm.mean_cost_j), _number(arm.std_cost_j)),
                arm.expected_cost or "-",
            ]
            for arm in view.arms
        ],
    )
    owned = any(trial.owner for trial in view.trials)
    limited = any(trial.power_limits for trial in view.trials)
    measured = ["EPOCHS", "TIME S", "ENERGY J", "COST J", "METRIC"]
    optional = [*(["POWER LIMIT W"] if limited else []), *(["TOKEN"] if owned else [])]
    trials = table(
        ["TRIAL", "BATCH SIZE", "STATE", "ORIGIN", *measured, *optional, "WHY THIS SIZE"],
        [
            [
                str(trial.trial_number),
                str(trial.batch_size),
                trial.state,
                trial.origin,
                _number(trial.epochs),
                _number(trial.time_s),
                _number(trial.energy_j),
                _number(trial.cost_j),
                _number(trial.metric),
                *([_power_limit(trial)] if limited else []),
                *([_text(trial.owner)] if owned else []),
                _with_bound(trial) if verbose else trial.reason,
            ]
            for trial in view.trials
        ],
    )
    sources = sorted({trial.energy_source for trial in view.trials if trial.energy_source})
    energy = f"energy by {', '.join(sources)}" if sources else "no energy reported yet"
    if len(view.trials) < count:
        trials += f"\nThe latest {len(view.trials)} of {count} trials; --all shows them all."
    return "\n\n".join([head, _savings(view), arms, trials, energy])


def explanation_text(view: Explanation) -> str:
    """The reason for a batch size that was chosen, or would be: a sentence, and a table of beliefs about each size."""
    subject = "the next trial" if view.trial_number is None else f"trial {view.trial_number}"
    state = "" if view.state is None else f", {view.state}"
    head = f"job {view.job_id}, {subject}: batch size {view.batch_size} ({view.origin}{state})"
    decision = view.decision
    if decision is None:
        return f"{head}\n\n{view.sentence}\n\nNo numbers are kept of this decision."
    candidates = {each.batch_size: each for each in decision.candidates}
    rows = []
    for size in decision.sizes:
        known = candidates.get(size.batch_size)
        band = "-" if size.low_j is None else f"{_number(size.low_j)} to {_number(size.high_j)}"
        row = [str(size.batch_size), _number(size.expected_cost_j), band, _percent(size.chance_best)]
        if candidates:
            worth = (None, None, None) if known is None else (known.value, known.loss, known.stop_epochs)
            row += map(_number, worth)
        notes = {decision.incumbent: "best known", view.batch_size: "chosen"}
        notes |= {view.batch_size: "best known, chosen"} if view.batch_size == decision.incumbent else {}
        rows.append([*row, notes.get(size.batch_size, "")])
    header = ["BATCH SIZE", "EXPECTED COST J", "90 % BAND J", "CHANCE TO BE BEST"]
    header += ["WORTH OF A TRY", "ITS LOSS", "STOP AFTER EPOCHS"] if candidates else []
    told = [head, view.sentence, table([*header, ""], rows)]
    if candidates:
        told.append(f"Worth and loss are in runs of {decision.incumbent}, the best size known.")
    return "\n\n".join(told)


def _percent(chance: float | None) -> str:
    return "-" if chance is None else f"{chance:.0%}".replace("%", " %")


def _savings(view: JobView) -> str:
    saved, default = view.savings, view.job.default_batch_size
    if saved is None:
        return f"nothing to compare with yet: no run at the default, {default}, has reached the target"
    runs = "1 recurrence" if saved.recurrences == 1 else f"{saved.recurrences} recurrences"
    amounts = ", ".join(
        f"{name} {amount.in_words}"
        for name, amount in (("energy", saved.energy_j), ("time", saved.time_s), ("cost", saved.cost_j))
    )
    exploring = f"; of the cost, exploring took {_number(saved.exploration_cost_j)} J" * bool(saved.exploration_cost_j)
    return f"{runs} against as many at the default, {default}: {amounts}{exploring}"


def _owner(job: JobSummary | JobView) -> str:
    return f"{_text(job.owner)}{' (shared)' if job.shared else ''}"


def _with_bound(trial: TrialView) -> str:
    if trial.epoch_bound is None:
        return trial.reason
    return f"{trial.reason}; at most {trial.epoch_bound} epochs: {trial.epoch_bound_reason}"


def _power_limit(trial: TrialView) -> str:
    return "-" if trial.power_limits is None else f"{_number(trial.power_limit_w)} of {trial.power_limits}"


def _best(view: JobView) -> str:
    best = view.arm_of(view.best_batch_size)
    if best is None:
        return "no batch size has reached the target yet"
    return f"best batch size {best.batch_size}, {best.expected_cost} J a run expected"


def token_list_text(tokens: Sequence[TokenRecord], jobs: Mapping[str, int]) -> str:
    """A table with a line per token, and the number of its jobs."""
    if not tokens:
        return "no tokens"
    header = ["ID", "NAME", "SCOPES", "JOBS", "CREATED (UTC)", "ROTATED (UTC)", "OLD SECRET UNTIL", "REVOKED (UTC)"]
    rows = [
        [
            *(one.token_id, one.name, " ".join(sorted(one.scopes))),
            f"{jobs.get(one.token_id, 0)}{' (shares)' if one.shares_jobs else ''}",
            *map(_time, (one.created_at, one.rotated_at, one.previous_until, one.revoked_at)),
        ]
        for one in tokens
    ]
    return table(header, rows)


def token_list_json(tokens: Sequence[TokenRecord], jobs: Mapping[str, int]) -> str:
    """The same for machines: what people may see of tokens, without their hashes."""
    shown = [
        {
            "token_id": token.token_id,
            "name": token.name,
            "scopes": sorted(token.scopes),
            "jobs": jobs.get(token.token_id, 0),
            "shares_jobs": token.shares_jobs,
            **{
                name: None if instant is None else instant.isoformat()
                for name, instant in (
                    ("created_at", token.created_at),
                    ("rotated_at", token.rotated_at),
                    ("previous_secret_until", token.previous_until),
                    ("revoked_at", token.revoked_at),
                )
            },
        }
        for token in tokens
    ]
    return json.dumps({"tokens": shown}, indent=2)


def _time(instant: datetime | None) -> str:
    return "-" if instant is None else f"{instant:%Y-%m-%d %H:%M}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _text(value: object | None) -> str:
    return "-" if value is None else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )
