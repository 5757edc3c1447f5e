"""The lines of the log, as text or as JSON, without secrets."""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered."""

TRACE_ID: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""The id of the trace that it belongs to, in hex digits."""

# Nothing logs a token. If something ever does, or a client writes one where its address goes, the secret stays out.
_SECRET = re.compile(r"(zbso_[0-9a-f]{8})_[A-Za-z0-9_-]+")


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return _without_secrets(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, and what there is of the others.

    These are ``request_id``, where a request is being answered, ``trace_id``, where it is traced, and ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, known in (("request_id", REQUEST_ID.get()), ("trace_id", TRACE_ID.get())):
            if known is not None:
                line[name] = known
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _without_secrets(json.dumps(line, ensure_ascii=False))


def _without_secrets(line: str) -> str:
    return _SECRET.sub(r"\1_…", line)
