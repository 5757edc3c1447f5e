"""Jobs during their import, which queries ignore.

An import writes the rows of its job in many small transactions. Until the last one, `jobs.importing_at` holds the time
of the last insertion and no query finds the job. That time also marks the import: each transaction replaces the mark of
the one before, so that an import that was given up and replaced cannot continue.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select, update

from bso_server.storage.tables import decisions, epochs, jobs, power_profiles, trials
from bso_server.storage.transaction import Transaction


def mark_of(transaction: Transaction, job_id: str) -> datetime | None:
    """Return the mark of a job during its import; None if the job does not exist or its import has ended."""
    return transaction.connection.scalar(select(jobs.c.importing_at).where(jobs.c.job_id == job_id))


def replace_mark(transaction: Transaction, job_id: str, before: datetime, after: datetime | None) -> bool:
    """Replace an import's mark, by None to end the import; return False if the mark is no longer `before`."""
    statement = update(jobs).where(jobs.c.job_id == job_id, jobs.c.importing_at == before)
    return bool(transaction.connection.execute(statement.values(importing_at=after)).rowcount)


def silent_since(transaction: Transaction, instant: datetime) -> dict[str, datetime]:
    """Return the marks of the imports that have inserted nothing since `instant`, by job."""
    statement = select(jobs.c.job_id, jobs.c.importing_at).where(jobs.c.importing_at < instant)
    return dict(map(tuple, transaction.tuples(statement)))


def remove_some(transaction: Transaction, job_id: str, *, limit: int) -> int:
    """Delete up to `limit` rows of a job during its import, or the job without rows; return the number of rows."""
    for table in (epochs, power_profiles, decisions, trials):
        if removed := transaction.delete_some_of(table, job_id, limit=limit):
            return removed
    transaction.connection.execute(delete(jobs).where(jobs.c.job_id == job_id))
    return 0
