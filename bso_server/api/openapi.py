"""The OpenAPI document, with pydantic's own description of each message.

Litestar's schemas lose constraints inside unions and describe ``tuple[X, ...]`` as a list of X or anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin
from pydantic.json_schema import models_json_schema

from zeus_plugins.protocol import WireMessage


class OpenApiDocument(JsonRenderPlugin):
    """Route that serves the document as ``/openapi.json``."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Render the completed document."""
        return super().render(request, completed(openapi_schema))


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Return Litestar's document with pydantic's schemas."""
    components, ours = document["components"], _schemas()
    schemas = {name: ours.get(name, schema) for name, schema in components["schemas"].items()}
    return {**document, "components": {**components, "schemas": schemas}}


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
