"""Refusals of a batch size optimization server, whichever it is: what they say, and the errors that they become."""

from __future__ import annotations

import json
from typing import Any

from zeus_plugins.client.port import TOKEN_VARIABLE
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTokenError


def error_of(
    status: int,
    text: str,
    *,
    server_url: str,
    request: str,
    is_registration: bool,
    is_foreign: bool = False,
    reason: str | None = None,
) -> ZeusBSOError:
    """The error that a refusal becomes, by its HTTP status or the one that it would have over HTTP.

    A conflict is one of configurations if the request, told in words, was to register a job. A foreign answer is one
    that does not look like that of a batch size optimization server.
    """
    if status == 401:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not accept the token ({status}: {text}): pass a valid token= or set "
            f"{TOKEN_VARIABLE}",
            status=status,
        )
    if status == 403:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not allow that ({status}): {text}. The token is what token= or "
            f"{TOKEN_VARIABLE} says",
            status=status,
        )
    if status == 422 or (status == 409 and is_registration):
        return ZeusBSOConfigError(f"the server at {server_url} refuses the job ({status}): {text}", status=status)
    return ZeusBSORuntimeError(
        f"{request} failed ({status}): {text}", status=status, is_foreign=is_foreign, reason=reason
    )


def said_in_error_body(text: str) -> str:
    """The message in an error answer's body, and the fields at fault that it does not name; empty in any other body.

    Our server sends `zeus_plugins.protocol.ErrorBody`; Zeus's sends ``{"message": …}``, and the framework under it
    ``{"detail": …}`` with a text or with a list of the fields at fault.
    """
    body = _error_body(text)
    texts = (body.get("message"), body.get("detail"))
    message = next((text for text in texts if isinstance(text, str) and text), "")
    fields = [f"{field}: {said}" for field, said in _fields_at_fault(body) if not said or said not in message]
    return "; ".join(part for part in [message, *fields] if part)


def reason_in_error_body(text: str) -> str | None:
    """The reason for programs in an error answer's body, or None."""
    reason = _error_body(text).get("reason")
    return reason if isinstance(reason, str) else None


def _error_body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _fields_at_fault(body: dict[str, Any]) -> list[tuple[str, str]]:
    ours, frameworks = body.get("errors"), body.get("detail")
    if isinstance(ours, list):
        return [(str(item.get("field")), str(item.get("message"))) for item in ours if isinstance(item, dict)]
    if isinstance(frameworks, list):
        return [(_dotted(item.get("loc")), str(item.get("msg"))) for item in frameworks if isinstance(item, dict)]
    return []


def _dotted(location: object) -> str:
    """``["body", "eta_knob"]`` as ``eta_knob``."""
    parts = location if isinstance(location, list) else [location]
    return ".".join(str(part) for part in parts if part not in ("body", "query"))
