"""The application: everything is put together here, and nothing happens at import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from litestar import Litestar
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.middleware.rate_limit import RateLimitConfig
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.stores.memory import MemoryStore

from bso_server.api import HANDLERS
from bso_server.api.admin import metrics_route
from bso_server.api.auth import AccessControl, RefusalLog
from bso_server.api.bodies import BodyRequest
from bso_server.api.dashboard import PAGES, JobPages, home
from bso_server.api.errors import EXCEPTION_HANDLERS
from bso_server.api.openapi import OpenApiDocument
from bso_server.core.occurrences import Listener, nobody
from bso_server.errors import DatabaseUnavailableError
from bso_server.metrics.watch import Watch
from bso_server.service.commands import BatchSizeService, Commands
from bso_server.service.health import Health, TotalsReader
from bso_server.service.pages import Pages
from bso_server.service.reading import JobReader
from bso_server.service.tokens import Authenticator, Tokens
from bso_server.service.views import Tariff
from bso_server.settings import Settings
from bso_server.storage.database import open_database
from bso_server.storage.store import Store

_REQUEST_COUNTS = "request_counts"

logger = logging.getLogger("bso_server")


def create_app(settings: Settings | None = None) -> Litestar:
    """Build the application, by the environment if no settings are given.

    Raises:
        ValueError: The database cannot be used, or what traces need is not installed.
    """
    settings = settings or Settings()
    watch = Watch(counts=settings.metrics != "off", traces=settings.tracing)
    store = store_of(settings, watch.hear)
    service = BatchSizeService(store, Commands(leases=settings.leases, crash_retries=settings.crash_retries))
    tokens = Tokens(store)
    allowed_hosts = [host.strip() for host in settings.allowed_hosts.split(",")]
    authenticator = Authenticator(tokens, insecure=settings.insecure, allowed_hosts=allowed_hosts, listener=watch.hear)
    request_counts = MemoryStore()
    rate_limit = settings.rate_limit_per_minute
    reader = JobReader(store)
    source = JobPages(reader, Pages(Tariff.model_validate(settings, from_attributes=True)))
    health = Health(store, reader)

    exposition = watch.exposition(TotalsReader(store).read, settings.metrics_jobs)
    metrics = [] if exposition is None else [metrics_route(exposition, is_open=settings.metrics == "open")]

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncIterator[None]:
        try:
            await prepare(store)
            logger.info("database: %s", store.description)
            await _say_who_is_served(settings, tokens)
            reaper = asyncio.create_task(_reap_for_ever(service, request_counts, settings.reap_interval_s))
            yield
            reaper.cancel()
        finally:
            await watch.close()
            await store.close()

    app = Litestar(
        route_handlers=[*HANDLERS, *metrics, PAGES, home],
        dependencies={
            "service": Provide(lambda: service, sync_to_thread=False),
            "reader": Provide(lambda: reader, sync_to_thread=False),
            "source": Provide(lambda: source, sync_to_thread=False),
            "health": Provide(lambda: health, sync_to_thread=False),
            "tokens": Provide(lambda: tokens, sync_to_thread=False),
            "sessions": Provide(lambda: authenticator, sync_to_thread=False),
        },
        middleware=[
            *([] if rate_limit is None else [_rate_limit(rate_limit)]),
            AccessControl(authenticator, allowed_hosts, read_timeout_s=settings.read_timeout_s),
        ],
        stores={_REQUEST_COUNTS: request_counts},
        request_class=BodyRequest,
        request_max_body_size=settings.max_body_bytes,
        exception_handlers=EXCEPTION_HANDLERS,
        after_exception=[RefusalLog(listener=watch.hear).note],
        lifespan=[lifespan],
        # Logging is the launcher's business; Litestar's own set-up would write request bodies.
        logging_config=None,
        # The other renderers load their scripts from a CDN.
        openapi_config=OpenAPIConfig(
            title="Batch size optimization server",
            version=version("zeus-plugins"),
            path="/schema",
            render_plugins=[OpenApiDocument(path="/openapi.json")],
            use_handler_docstrings=True,
            components=Components(
                security_schemes={
                    "bearer": SecurityScheme(type="http", scheme="bearer"),
                    "basic": SecurityScheme(type="http", scheme="basic", description="the token is the password"),
                }
            ),
            security=[{"bearer": []}, {"basic": []}],
        ),
    )
    # Around everything: what leads to no route is answered before any of Litestar's middleware.
    app.asgi_handler = watch.around(app.asgi_handler)
    return app


def store_of(settings: Settings, listener: Listener = nobody) -> Store:
    """The database that the settings name; `ValueError` if it cannot be used."""
    password = settings.db_password
    database = open_database(
        settings.database_url,
        user=settings.db_user,
        password=None if password is None else password.get_secret_value(),
        echo_sql=settings.echo_sql,
        patience_s=settings.database_timeout_s,
    )
    return Store(database, patience_s=settings.database_timeout_s, listener=listener)


async def prepare(store: Store, *, migrate: bool = False) -> None:
    """Make sure that the database has this version's schema.

    A SQLite file, which has one owner, is migrated in any case; without `migrate`, others are left to their operator.

    Raises:
        DatabaseNotReadyError: It has another schema.
    """
    if migrate or store.is_sqlite:
        await store.migrate()
    else:
        await store.check_schema()


async def _say_who_is_served(settings: Settings, tokens: Tokens) -> None:
    if settings.insecure:
        logger.warning(
            "INSECURE: everybody who reaches this server can read, change and delete every job, because of --insecure "
            "or ZEUS_BSO_INSECURE"
        )
    elif not await tokens.any():
        logger.info("no tokens yet: only clients of this machine are served; bso-server token create makes a token")
    elif not await tokens.any_valid():
        logger.warning("all tokens are revoked: nobody is served until bso-server token create makes another one")


def _rate_limit(per_minute: int) -> DefineMiddleware:
    return RateLimitConfig(rate_limit=("minute", per_minute), exclude="^/health/", store=_REQUEST_COUNTS).middleware


async def _reap_for_ever(service: BatchSizeService, request_counts: MemoryStore, interval_s: float) -> None:
    """Abandon trials that nobody hears of, so that the jobs of killed trainings go on; each process does it.

    Also forgets the addresses that have not asked for a while.
    """
    while True:
        await asyncio.sleep(interval_s)
        await request_counts.delete_expired()
        try:
            await service.reap()
        except DatabaseUnavailableError:
            # The store has said so.
            pass
        except Exception:
            # The next round tries again.
            logger.exception("could not look for abandoned trials")


def __getattr__(name: str) -> Litestar:
    """Build ``app`` when ``uvicorn bso_server.app:app`` asks for it."""
    if name == "app":
        return create_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
