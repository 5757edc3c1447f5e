"""Alembic's environment, with the connection from `migrations`."""

from __future__ import annotations

from alembic import context

from bso_server.storage.tables import metadata

# SQLite alters tables by copying them, which needs batch mode.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
# The connection is in a transaction already.
context.run_migrations()
