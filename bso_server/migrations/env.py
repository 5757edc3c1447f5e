"""Run by Alembic for each command: takes the connection that `bso_server.migrations` hands over."""

from __future__ import annotations

from alembic import context

from bso_server.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite alters tables by copying them.
    render_as_batch=True,
)
context.run_migrations()
