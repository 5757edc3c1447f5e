"""A master that launches a recurring training script, with the interface of Zeus's master.

`ZeusMaster` launches the script once per run. `ServerOptimizer` chooses each batch size.
Importing this package loads neither torch nor the server.
"""

from __future__ import annotations

from zeus_plugins.master.history import MasterState, Run
from zeus_plugins.master.job import Job
from zeus_plugins.master.optimizers import ServerOptimizer
from zeus_plugins.master.runner import FailedTryError, ZeusMaster

__all__ = [
    "FailedTryError",
    "Job",
    "MasterState",
    "Run",
    "ServerOptimizer",
    "ZeusMaster",
]
