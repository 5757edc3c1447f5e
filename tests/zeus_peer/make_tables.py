"""Make the tables of Zeus's batch size optimization server in a SQLite file. Runs where Zeus is installed.

Usage: ``python make_tables.py FILE``. Zeus 0.16 ships the tables' definitions, but no migrations that would make them.
"""

from __future__ import annotations

import sys

from sqlalchemy import create_engine
from zeus.optimizer.batch_size.server.database.schema import Base

Base.metadata.create_all(create_engine(f"sqlite:///{sys.argv[1]}"))
