"""The training side of zeus-plugins.

Importing this package loads no deep-learning framework; the callbacks live in `zeus_plugins.lightning` and its siblings.
"""

from __future__ import annotations

from zeus_plugins.optimizer import BatchSizeOptimizer
from zeus_plugins.protocol import JobSpec

__all__ = ["BatchSizeOptimizer", "JobSpec"]
