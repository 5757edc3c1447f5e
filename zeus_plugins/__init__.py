"""The training side of zeus-plugins.

Importing this package loads no deep-learning framework; `zeus_plugins.lightning` and `zeus_plugins.huggingface` hold
the callbacks for Lightning and for the Hugging Face Trainer. The errors that users meet are here as in
`zeus_plugins.errors`.
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
    """Load the optimizer, with all that measures and reports, when somebody asks for it: a server does not."""
    if name == "BatchSizeOptimizer":
        from zeus_plugins.optimizer import BatchSizeOptimizer

        return BatchSizeOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
