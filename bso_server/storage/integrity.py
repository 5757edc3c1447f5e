"""Integrity checks: damage that a database finds in its own pages, and damage that it cannot find."""

from __future__ import annotations

from bso_server.storage.tables import metadata
from bso_server.storage.transaction import Transaction

# Both queries call functions of PostgreSQL's extension amcheck. The second query compares each index with its table,
# and raises an error if they differ.
_HEAPS = """
    SELECT c.relname, checked.blkno, checked.msg FROM pg_class c, LATERAL verify_heapam(c.oid) checked
    WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
"""
_INDEXES = """
    SELECT bt_index_check(c.oid, true)
    FROM pg_class c JOIN pg_am a ON a.oid = c.relam JOIN pg_index i ON i.indexrelid = c.oid
    WHERE a.amname = 'btree' AND i.indisvalid AND c.relnamespace = current_schema()::regnamespace
"""


def check_integrity(transaction: Transaction) -> tuple[list[str], str]:
    """Let the database check its tables and indexes; return the damage found, and the kind of damage it cannot find."""
    execute = transaction.connection.exec_driver_sql
    match transaction.connection.dialect.name:
        case "sqlite":
            # This check includes `quick_check`, and also compares each index with its table.
            found = [said for (said,) in execute("PRAGMA integrity_check") if said != "ok"]
            return found, "changed values in intact pages, because SQLite has no checksums"
        case "postgresql":
            found = [f"table {name}, block {block}: {said}" for name, block, said in execute(_HEAPS)]
            execute(_INDEXES)
            return found, "changed values in intact pages, unless the cluster has data checksums"
        case _:
            checked = execute(f"CHECK TABLE {', '.join(metadata.tables)}")
            found = [f"{table}: {said}" for table, _, kind, said in checked if kind != "note" and said != "OK"]
            return found, "values that were wrong before their page got its checksum"
