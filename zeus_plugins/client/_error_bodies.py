"""What an error answer of a batch size optimization server says, whichever server it is."""

from __future__ import annotations

import json
from typing import Any


def said_in_error_body(text: str) -> str:
    """Read the body of an error answer.

    Our server sends `zeus_plugins.protocol.ErrorBody`; Zeus's sends ``{"message": …}``, and the framework under it
    ``{"detail": …}`` with a text or with a list of the fields at fault.

    Args:
        text: The body.

    Returns:
        The message, followed by the fields at fault that it does not name itself; empty when this is no such body.
    """
    try:
        body = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(body, dict):
        return ""
    message = _first_text(body.get("message"), body.get("detail"))
    fields = [field for field in _fields_at_fault(body) if field not in message]
    return "; ".join(part for part in [message, *fields] if part)


def _first_text(*candidates: object) -> str:
    return next((text for text in candidates if isinstance(text, str) and text), "")


def _fields_at_fault(body: dict[str, Any]) -> list[str]:
    ours, frameworks = body.get("errors"), body.get("detail")
    if isinstance(ours, list):
        return [f"{item.get('field')}: {item.get('message')}" for item in ours if isinstance(item, dict)]
    if isinstance(frameworks, list):
        return [f"{_dotted(item.get('loc'))}: {item.get('msg')}" for item in frameworks if isinstance(item, dict)]
    return []


def _dotted(location: object) -> str:
    """``["body", "eta_knob"]`` as ``eta_knob``."""
    parts = location if isinstance(location, list) else [location]
    return ".".join(str(part) for part in parts if part not in ("body", "query"))
