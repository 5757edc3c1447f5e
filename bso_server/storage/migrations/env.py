"""Alembic's environment, with the connection or the dialect from `migrations`."""

from __future__ import annotations

from alembic import context

from bso_server.storage.tables import metadata

if context.is_offline_mode():
    context.configure(dialect_name=context.config.attributes["dialect"], target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    # SQLite alters tables by copying them, which needs batch mode.
    context.configure(
        connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
    )
    # The connection is in a transaction already.
    context.run_migrations()
