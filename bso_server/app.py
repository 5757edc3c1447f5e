"""The application: everything is put together here, and nothing happens at import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin

from bso_server.http_errors import EXCEPTION_HANDLERS
from bso_server.routes import HANDLERS
from bso_server.service import BatchSizeService
from bso_server.settings import Settings
from bso_server.store import Store, open_store

logger = logging.getLogger("bso_server")


def create_app(settings: Settings | None = None) -> Litestar:
    """Build the application.

    Args:
        settings: How to run; read from the environment when None.

    Raises:
        ValueError: The database cannot be used.
    """
    settings = settings or Settings()
    store = store_of(settings)
    service = BatchSizeService(store, crash_retries=settings.crash_retries)

    def provide_service() -> BatchSizeService:
        return service

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncIterator[None]:
        await prepare(store)
        logger.info("database: %s", store.description)
        reaper = asyncio.create_task(_reap_for_ever(service, settings.reap_interval_s))
        yield
        reaper.cancel()
        await store.close()

    return Litestar(
        route_handlers=HANDLERS,
        dependencies={"service": Provide(provide_service, sync_to_thread=False)},
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=[lifespan],
        # Logging is the launcher's business; Litestar's own set-up would write request bodies.
        logging_config=None,
        # The other renderers load their scripts from a CDN.
        openapi_config=OpenAPIConfig(
            title="Batch size optimization server",
            version=version("zeus-plugins"),
            path="/schema",
            render_plugins=[JsonRenderPlugin(path="/openapi.json")],
        ),
    )


def store_of(settings: Settings) -> Store:
    """The database that the settings name.

    Raises:
        ValueError: It cannot be used.
    """
    password = settings.db_password
    return open_store(
        settings.database_url,
        user=settings.db_user,
        password=None if password is None else password.get_secret_value(),
        echo_sql=settings.echo_sql,
    )


async def prepare(store: Store, *, migrate: bool = False) -> None:
    """Make sure that the database has this version's schema.

    Args:
        store: The database. A SQLite file, which has one owner, is migrated in any case.
        migrate: Migrate other databases, too; without it, changing their schema is left to their operator.

    Raises:
        DatabaseNotReadyError: It has another schema.
    """
    if migrate or store.is_sqlite:
        await store.migrate()
    else:
        await store.check_schema()


async def _reap_for_ever(service: BatchSizeService, interval_s: float) -> None:
    """Abandon trials that nobody hears of, so that the jobs of killed trainings go on; each process does it."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await service.reap()
        except Exception:
            # The database may be away for a while; the next round tries again.
            logger.exception("could not look for abandoned trials")


def __getattr__(name: str) -> Litestar:
    """Build ``app`` when ``uvicorn bso_server.app:app`` asks for it."""
    if name == "app":
        return create_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
