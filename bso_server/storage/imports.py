"""Jobs while they are imported: rows that nobody sees yet.

An import writes the rows of its job in many small transactions. Until the last one the job's row says when something
was added (`importing_at`), and no query finds the job. That instant is the import's mark, too: each transaction
replaces the mark that the one before has left, so that an import that was given up meanwhile cannot go on.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select, update

from bso_server.storage.tables import decisions, epochs, jobs, power_profiles, trials
from bso_server.storage.transaction import Transaction


def mark_of(transaction: Transaction, job_id: str) -> datetime | None:
    """The mark of a job that is being imported; None if there is none, or it is imported."""
    (found,) = transaction.rows(select(jobs.c.importing_at).where(jobs.c.job_id == job_id)) or ({"importing_at": None},)
    mark: datetime | None = found["importing_at"]
    return mark


def replace_mark(transaction: Transaction, job_id: str, before: datetime, after: datetime | None) -> bool:
    """Replace an import's mark, None being that of a job that is there; False if it is another one by now."""
    statement = update(jobs).where(jobs.c.job_id == job_id, jobs.c.importing_at == before)
    return bool(transaction.change(statement.values(importing_at=after)))


def silent_since(transaction: Transaction, instant: datetime) -> dict[str, datetime]:
    """The jobs whose imports have not added anything since then, with their marks."""
    statement = select(jobs.c.job_id, jobs.c.importing_at).where(jobs.c.importing_at < instant)
    return {row["job_id"]: row["importing_at"] for row in transaction.rows(statement)}


def remove_some(transaction: Transaction, job_id: str, *, limit: int) -> int:
    """Remove rows of a job that is being imported, at most so many of a table, and at last the job; their number."""
    for table in (epochs, power_profiles, decisions, trials):
        if removed := transaction.delete_some_of(table, job_id, limit=limit):
            return removed
    transaction.change(delete(jobs).where(jobs.c.job_id == job_id))
    return 0
