"""The training side of zeus-plugins, with the errors of `zeus_plugins.errors`.

Importing this package loads no deep-learning framework; the callbacks are in `zeus_plugins.lightning` and
`zeus_plugins.huggingface`.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    """Import the optimizer on first use: a server imports this package and needs none of what it loads."""
    if name == "BatchSizeOptimizer":
        from zeus_plugins.optimizer import BatchSizeOptimizer

        return BatchSizeOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
