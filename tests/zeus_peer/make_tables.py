"""Make the tables of Zeus's batch size optimization server in an empty database. Runs where Zeus is installed.

Usage: ``python make_tables.py DATABASE_URL``, with an asynchronous driver, as Zeus's server requires. Zeus 0.16 ships
the tables' definitions, but no migrations that create them.
"""

from __future__ import annotations

import asyncio
import sys

from sqlalchemy.ext.asyncio import create_async_engine
from zeus.optimizer.batch_size.server.database.schema import Base


async def main() -> None:
    engine = create_async_engine(sys.argv[1])
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


asyncio.run(main())
