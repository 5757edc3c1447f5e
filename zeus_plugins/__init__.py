"""The training side of zeus-plugins.

Importing this package loads no deep-learning framework; `zeus_plugins.lightning` and `zeus_plugins.huggingface` hold
the callbacks for Lightning and for the Hugging Face Trainer. The errors that users meet are here as in
`zeus_plugins.errors`.
"""

from __future__ import annotations

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
from zeus_plugins.optimizer import BatchSizeOptimizer
from zeus_plugins.protocol import JobSpec

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
