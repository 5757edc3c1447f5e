"""Rows of webhooks: functions over a transaction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import and_, case, delete, func, insert, or_, select, update

from bso_server.storage.tables import jobs, trials, webhook_jobs, webhooks
from bso_server.storage.transaction import IS_THERE, Transaction
from zeus_plugins.protocol import TrialState

Row, _KNOWN = webhooks.c, webhook_jobs.c.keys()


@dataclass(frozen=True, slots=True)
class Webhook:
    """Row of `tables.webhooks`: an address that gets messages."""

    webhook_id: str
    url: str
    format: str
    events: str
    secret: str
    created_at: datetime
    week: datetime
    next_attempt_at: datetime | None
    failing_since: datetime | None = None
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class KnownJob:
    """Row of `tables.webhook_jobs`: the state of a job according to the messages that a receiver has accepted."""

    job_id: str
    webhook_id: str
    event: int = 0
    word: str = "not shown yet"
    is_stuck: bool = False
    level_event: int = 0


def all_webhooks(transaction: Transaction) -> list[Webhook]:
    """Return every webhook, oldest first."""
    return [Webhook(**row) for row in transaction.rows(select(webhooks).order_by(Row.created_at, Row.webhook_id))]


def insert_webhook(transaction: Transaction, webhook: Webhook) -> None:
    """Insert a webhook, unless an earlier attempt, whose connection was lost, has committed it."""
    if not transaction.rows(select(Row.webhook_id).where(Row.webhook_id == webhook.webhook_id)):
        transaction.connection.execute(insert(webhooks).values(asdict(webhook)))


def delete_webhook(transaction: Transaction, webhook_id: str) -> bool:
    """Delete a webhook; return False if it did not exist."""
    transaction.connection.execute(delete(webhook_jobs).where(webhook_jobs.c.webhook_id == webhook_id))
    return bool(transaction.connection.execute(delete(webhooks).where(Row.webhook_id == webhook_id)).rowcount)


def update_webhook(transaction: Transaction, /, webhook_id: str, before: datetime | None, **values: object) -> bool:
    """Update a webhook; return False if another process has claimed it: its `next_attempt_at` is no longer `before`."""
    found = update(webhooks).where(Row.webhook_id == webhook_id, Row.next_attempt_at.is_not_distinct_from(before))
    return bool(transaction.connection.execute(found.values(values)).rowcount)


def jobs_with_news(
    transaction: Transaction, webhook_id: str, *, after: str, limit: int
) -> list[tuple[str, KnownJob | None]]:
    """Return a page of jobs with events that a receiver does not know, each with the state that it knows, or None.

    `after` is the last job_id of the page before.
    """
    known = webhook_jobs.c
    found = jobs.outerjoin(webhook_jobs, and_(known.job_id == jobs.c.job_id, known.webhook_id == webhook_id))
    statement = select(jobs.c.job_id.label("found"), webhook_jobs).select_from(found)
    is_new = or_(known.event.is_(None), known.event < jobs.c.event_count)
    statement = statement.where(IS_THERE, is_new, jobs.c.job_id > after).order_by(jobs.c.job_id).limit(limit)
    rows = transaction.rows(statement)
    return [
        (row["found"], None if row["job_id"] is None else KnownJob(**{name: row[name] for name in _KNOWN}))
        for row in rows
    ]


def save_known_job(transaction: Transaction, known: KnownJob) -> None:
    """Save the state of a job that a receiver knows, unless the job or the webhook was deleted."""
    row, table = asdict(known), webhook_jobs.c
    is_row = table.job_id == known.job_id, table.webhook_id == known.webhook_id
    if transaction.connection.execute(update(webhook_jobs).where(*is_row).values(row)).rowcount:
        return
    webhook = select(Row.webhook_id).where(Row.webhook_id == known.webhook_id)
    if transaction.job(known.job_id) is not None and transaction.rows(webhook):
        transaction.connection.execute(insert(webhook_jobs).values(row))


def totals_between(transaction: Transaction, begin: datetime, end: datetime) -> tuple[int, int, int, float, float]:
    """Return totals of the trials that ended in a period: jobs, trials, trials at the target, joules and seconds.

    Trials that were set aside are left out.
    """
    table = trials.c
    ended = table.ended_at >= begin, table.ended_at < end, table.state != TrialState.WITHDRAWN, IS_THERE
    reached = func.coalesce(func.sum(case((table.state == TrialState.COMPLETED, 1), else_=0)), 0)
    sums = [func.coalesce(func.sum(each), 0.0) for each in (table.energy_j, table.time_s)]
    statement = select(func.count(table.job_id.distinct()), func.count(), reached, *sums)
    (row,) = transaction.tuples(statement.select_from(trials.join(jobs)).where(*ended))
    jobs_count, count, reached_count, energy_j, time_s = tuple(row)
    return jobs_count, count, int(reached_count), float(energy_j), float(time_s)
