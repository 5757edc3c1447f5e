"""The training side of zeus-plugins, with the errors of `zeus_plugins.errors`.

Importing this package loads no deep-learning framework; the callbacks are in `zeus_plugins.lightning` and
`zeus_plugins.huggingface`.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from zeus_plugins.errors import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
    ZeusBSOServerUnreachableError,
    ZeusBSOTokenError,
    ZeusBSOTrainFailError,
)
from zeus_plugins.protocol import JobSpec
from zeus_plugins.protocol import printable as _printable

if sys.platform == "win32":
    raise ImportError("zeus-plugins runs on Linux and macOS; on Windows, use WSL")

if TYPE_CHECKING:
    from zeus_plugins.optimizer import BatchSizeOptimizer

__all__ = [
    "BatchSizeOptimizer",
    "JobSpec",
    "ZeusBSOBadOperationError",
    "ZeusBSOConfigError",
    "ZeusBSOError",
    "ZeusBSOOperationOrderError",
    "ZeusBSORuntimeError",
    "ZeusBSOServerUnreachableError",
    "ZeusBSOTokenError",
    "ZeusBSOTrainFailError",
]


def _escape_control_characters(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (shown := _printable(message)) != message:
        record.msg, record.args = shown, ()
    return True


# Log lines contain texts of servers, trainings and libraries, and the handlers are the user's own.
for _name in ("zeus_plugins", "zeus_plugins.energy", "bso_server"):
    logging.getLogger(_name).addFilter(_escape_control_characters)


def __getattr__(name: str) -> Any:
    """Import the optimizer on first use: a server imports this package and needs none of what it loads."""
    if name == "BatchSizeOptimizer":
        from zeus_plugins.optimizer import BatchSizeOptimizer

        return BatchSizeOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
