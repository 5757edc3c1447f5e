"""The OpenAPI document, with pydantic's own description of each message.

Litestar's schemas lose constraints inside unions and describe ``tuple[X, ...]`` as a list of X or anything. The
document also describes the lines of an export.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin
from pydantic.json_schema import models_json_schema

from bso_server.service.exports import JobExport, TrialExport
from zeus_plugins.protocol import WireMessage


class OpenApiDocument(JsonRenderPlugin):
    """Route that serves the document as ``/openapi.json``."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Render the completed document."""
        return super().render(request, completed(openapi_schema))


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Return Litestar's document with pydantic's schemas, and with the lines of an export, which no body refers to."""
    components = document["components"]
    ours = _schemas()
    used = set(components["schemas"])
    for message in (JobExport, TrialExport):
        used |= _named(message.__name__, ours)
    schemas = {name: ours.get(name) or components["schemas"][name] for name in sorted(used)}
    return {**document, "components": {**components, "schemas": schemas}}


def _named(name: str, schemas: dict[str, Any]) -> set[str]:
    """Return the names of a schema and of all schemas that it refers to."""
    found, to_see = set(), {name}
    while to_see:
        found |= to_see
        texts = json.dumps([schemas[each] for each in to_see])
        to_see = set(re.findall('"#/components/schemas/([^"]+)"', texts)) - found
    return found


@cache
def _schemas() -> dict[str, Any]:
    messages = [(message, "validation") for message in _below(WireMessage)]
    _, document = models_json_schema(messages, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # mypy takes the mode for any text
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _below(message: type[WireMessage]) -> Iterator[type[WireMessage]]:
    for kind in message.__subclasses__():
        yield kind
        yield from _below(kind)
