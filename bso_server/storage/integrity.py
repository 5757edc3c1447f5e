"""Integrity checks: damage that a database finds in its own pages, and damage that it cannot find."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import text

from bso_server.storage.tables import metadata
from bso_server.storage.transaction import Transaction

# The schema of the extension amcheck, if this user may execute both of its functions.
_AMCHECK = """
    SELECT e.extnamespace::regnamespace::text
    FROM pg_extension e JOIN pg_proc p ON p.pronamespace = e.extnamespace
    WHERE e.extname = 'amcheck' AND p.proname IN ('bt_index_check', 'verify_heapam')
    AND has_function_privilege(p.oid, 'EXECUTE')
    GROUP BY 1 HAVING count(DISTINCT p.proname) = 2
"""
_HEAPS = """
    SELECT c.relname, v.blkno, v.msg FROM pg_class c, LATERAL {}.verify_heapam(c.oid) v
    WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
"""
# Raises an error at the first damaged index; compares each index with its table.
_INDEXES = """
    SELECT {}.bt_index_check(c.oid, true)
    FROM pg_class c JOIN pg_am a ON a.oid = c.relam JOIN pg_index i ON i.indexrelid = c.oid
    WHERE a.amname = 'btree' AND i.indisvalid AND c.relnamespace = current_schema()::regnamespace
"""


class Integrity(NamedTuple):
    """Result of an integrity check.

    Attributes:
        damage: The damage that was found, in words.
        undetected: The damage that the check cannot find, in words.
    """

    damage: list[str]
    undetected: str


def check_integrity(transaction: Transaction) -> Integrity:
    """Let the database check its tables and indexes; a driver's error means damage, too."""
    connection = transaction.connection
    match connection.dialect.name:
        case "sqlite":
            # Includes quick_check, and compares each index with its table.
            found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            return Integrity(
                [line for line in found if line != "ok"],
                "changed values in intact pages, because SQLite has no checksums",
            )
        case "postgresql":
            return _check_postgresql(transaction)
        case _:
            checked = connection.exec_driver_sql(f"CHECK TABLE {', '.join(metadata.tables)}")
            return Integrity(
                [f"{table}: {said}" for table, _, kind, said in checked if kind != "note" and said != "OK"],
                "values that were wrong before their page got its checksum",
            )


def _check_postgresql(transaction: Transaction) -> Integrity:
    connection = transaction.connection
    schema = connection.scalar(text(_AMCHECK))
    if schema is None:
        return Integrity(
            [],
            "any damage that the replay does not meet, because the extension amcheck is missing or this user may not "
            "use it: let a superuser run pg_amcheck --install-missing on this database",
        )
    heaps = connection.execute(text(_HEAPS.format(schema)))
    damage = [f"table {name}, block {block}: {said}" for name, block, said in heaps]
    connection.execute(text(_INDEXES.format(schema)))
    if connection.scalar(text("SHOW data_checksums")) == "on":
        return Integrity(damage, "damage on the disk below pages that PostgreSQL has in memory")
    return Integrity(damage, "changed values in intact pages, because data checksums are off (pg_checksums --enable)")
