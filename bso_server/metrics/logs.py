"""Log lines as text or as JSON, without secrets."""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from zeus_plugins.protocol import printable

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the current request."""

TRACE_ID: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""Id of the current trace, in hex digits."""

# No code logs tokens; this removes the secret of a token that gets into a line by mistake, such as from a URL.
_SECRET = re.compile(r"(zbso_[0-9a-f]{8})_[A-Za-z0-9_-]+")


class TextFormatter(logging.Formatter):
    """Log lines as text, without control characters; further lines of a traceback or a statement are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        # No line that an exception quotes may look like a log line.
        lines = super().format(record).split("\n")
        return _without_secrets("\n    ".join(map(printable, lines)))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, ``message``.

    Lines about a request also have ``request_id`` and, if it is traced, ``trace_id``; errors have ``exception``.
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
