"""Import in `tests.support.warm` everything that a server imports, and create an application.

The first application of a process takes several times longer than the next one, because Litestar imports and caches
parts only then. The application itself is dropped: it has opened neither a database nor a socket.
"""

from __future__ import annotations

import alembic.command  # noqa: F401 - as below, for the processes that follow
import uvicorn.protocols.http.h11_impl  # noqa: F401
import uvloop  # noqa: F401

import bso_server.cli  # noqa: F401
from bso_server.app import create_app
from bso_server.settings import Settings

create_app(Settings(database_url="sqlite:///missing/bso.sqlite3"))
