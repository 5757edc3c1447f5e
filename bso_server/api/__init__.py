"""Litestar handlers: decode the request, call the service, encode the answer. SQL and error handling are elsewhere."""

from __future__ import annotations

from litestar.handlers import HTTPRouteHandler

from bso_server.api import admin, jobs, training

HANDLERS = [
    each for module in (training, jobs, admin) for each in vars(module).values() if isinstance(each, HTTPRouteHandler)
]
