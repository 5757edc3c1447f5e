"""The OpenAPI document, with pydantic's own description of each message.

Litestar's reading of them loses constraints inside of unions and takes ``tuple[X, ...]`` for a list of X or anything.
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
    """Serves the document as ``/openapi.json``, without anything from elsewhere."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """See `JsonRenderPlugin`."""
        components = openapi_schema["components"]
        ours = _schemas()
        schemas = {name: ours.get(name, schema) for name, schema in components["schemas"].items()}
        return super().render(request, {**openapi_schema, "components": {**components, "schemas": schemas}})


@cache
def _schemas() -> dict[str, Any]:
    """The JSON schema of each message and of what it is made of, by name."""
    messages = [(message, "validation") for message in _below(WireMessage)]
    _, document = models_json_schema(messages, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # mypy takes the mode for any text
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _below(message: type[WireMessage]) -> Iterator[type[WireMessage]]:
    for kind in message.__subclasses__():
        yield kind
        yield from _below(kind)
