"""Application of the server, assembled from its parts; importing this module has no side effects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme

from bso_server.api import HANDLERS
from bso_server.api.admin import metrics_route
from bso_server.api.auth import AccessControl, RefusalLog
from bso_server.api.dashboard import PAGES, JobPages, home
from bso_server.api.errors import EXCEPTION_HANDLERS
from bso_server.api.openapi import OpenApiDocument
from bso_server.api.requests import MAX_BODY_BYTES, BodyRequest
from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.metrics.requests import RequestWatch
from bso_server.service.commands import BatchSizeService, Commands
from bso_server.service.fleet import FleetReader
from bso_server.service.health import TotalsReader
from bso_server.service.pages import Pages
from bso_server.service.reading import JobReader
from bso_server.service.tokens import Authenticator, Tokens
from bso_server.service.verdicts import update, update_all
from bso_server.service.views import Tariff
from bso_server.settings import Settings, parts
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import package_version

logger = logging.getLogger("bso_server")


def create_app(settings: Settings | None = None) -> Litestar:
    """Build the application; if `settings` is None, take them from the environment.

    Raises:
        ValueError: The database cannot be used.
    """
    settings = settings or Settings()
    store = store_of(settings)
    # Imported here, because other commands do not need its library.
    from bso_server.metrics.prometheus import Metrics

    metrics = Metrics(TotalsReader(store).read, settings.metrics_jobs)
    store.listener = metrics.hear
    service = BatchSizeService(store, Commands(leases=settings.leases))
    tokens = Tokens(store)
    allowed_hosts = parts(settings.allowed_hosts)
    authenticator = Authenticator(tokens, insecure=settings.insecure, allowed_hosts=allowed_hosts)
    reader, tariff = JobReader(store), Tariff.model_validate(settings, from_attributes=True)
    dependencies = {
        "service": service,
        "reader": reader,
        "source": JobPages(reader, Pages(tariff), partial(update, store)),
        "fleet": FleetReader(store, tariff),
    }
    route = metrics_route(metrics.exposition, is_open=settings.metrics == "open")

    @asynccontextmanager
    async def lifespan(_app: Litestar) -> AsyncIterator[None]:
        try:
            await prepare(store)
            logger.info("database: %s", store.description)
            await _say_who_is_served(settings, tokens)
            # Two tasks, because the verdicts on thousands of jobs take minutes after an upgrade.
            sweeps = service.reap, partial(update_all, store)
            tasks = [asyncio.create_task(_repeat(sweep, settings.reap_interval_s)) for sweep in sweeps]
            yield
            for task in tasks:
                task.cancel()
        finally:
            await metrics.close()
            await store.close()

    app = Litestar(
        route_handlers=[*HANDLERS, route, PAGES, home],
        dependencies={name: _provide(each) for name, each in dependencies.items()},
        middleware=[
            AccessControl(
                authenticator, allowed_hosts, read_timeout_s=settings.read_timeout_s, sign_on=settings.single_sign_on
            ),
        ],
        request_class=BodyRequest,
        request_max_body_size=MAX_BODY_BYTES,
        exception_handlers=EXCEPTION_HANDLERS,
        after_exception=[RefusalLog(listener=store.listener).note],
        lifespan=[lifespan],
        # The launcher configures logging; Litestar's own configuration would log request bodies.
        logging_config=None,
        # Only JSON: Litestar's other renderers load scripts from a CDN.
        openapi_config=OpenAPIConfig(
            title="Batch size optimization server",
            version=package_version(),
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
    # Not as middleware, because Litestar answers unknown routes before its middleware.
    app.asgi_handler = RequestWatch(app.asgi_handler, metrics.request_done)
    return app


def store_of(settings: Settings) -> Store:
    """Return a store for the database in the settings; raise `ValueError` if that database cannot be used."""
    password = settings.db_password
    database = open_database(
        settings.database_url,
        user=settings.db_user,
        password=None if password is None else password.get_secret_value(),
        patience_s=settings.database_timeout_s,
    )
    return Store(database, patience_s=settings.database_timeout_s)


async def prepare(store: Store, *, migrate: bool = False) -> None:
    """Upgrade the schema of a SQLite file, which has one owner, or with `migrate` of any database; then check it.

    Raises:
        DatabaseNotReadyError: The schema was not upgraded, and is not the schema of this version.
    """
    if migrate or store.is_sqlite:
        await store.migrate()
    await store.check_schema()
    # The user of the database may have rights on the table of the schema only.
    await store.read(Transaction.any_token)


async def _say_who_is_served(settings: Settings, tokens: Tokens) -> None:
    if settings.insecure:
        logger.warning(
            "INSECURE: any client that reaches this server can read, change and delete every job, because of "
            "--insecure or ZEUS_BSO_INSECURE"
        )
    elif not await tokens.any():
        logger.info("no tokens yet: only clients of this machine are served; bso-server token create makes a token")


def _provide(dependency: object) -> Provide:
    return Provide(lambda: dependency, sync_to_thread=False)


async def _repeat(sweep: Callable[[], Awaitable[object]], interval_s: float) -> None:
    """Call `sweep` every `interval_s` seconds until cancelled, also after an unexpected error."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await sweep()
        except (DatabaseNotReadyError, DatabaseUnavailableError):
            # The store has logged the error, or logs it at the next request.
            pass
        except Exception:
            logger.exception("could not look for abandoned trials or outdated verdicts")


def __getattr__(name: str) -> Litestar:
    """Build ``app`` on demand, for ``uvicorn bso_server.app:app``."""
    if name == "app":
        return create_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
