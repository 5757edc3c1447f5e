"""The names that a policy of another package is written with; docs/policy.md has an example.

They stay as they are within a minor version. Everything else of `bso_server` may change at any time.
"""

from bso_server.core.history import Arm, Cheapest, History, after_report, cost_of, log_costs_per_epoch
from bso_server.core.model import (
    OBSERVED,
    EpochBound,
    Expectations,
    ExpectedCost,
    Report,
    Suggestion,
    TrialRecord,
)
from bso_server.core.registry import GROUP, Memory, Policy, own_bound
from bso_server.core.statistics import Statistics
from bso_server.errors import InvalidJobError, NoSurvivorError
from zeus_plugins.protocol import (
    CandidateWorth,
    Decision,
    EndReason,
    JobRegistration,
    Origin,
    SizeBelief,
    StopRule,
    TrialState,
)

__all__ = [
    "GROUP",
    "OBSERVED",
    "Arm",
    "CandidateWorth",
    "Cheapest",
    "Decision",
    "EndReason",
    "EpochBound",
    "Expectations",
    "ExpectedCost",
    "History",
    "InvalidJobError",
    "JobRegistration",
    "Memory",
    "NoSurvivorError",
    "Origin",
    "Policy",
    "Report",
    "SizeBelief",
    "Statistics",
    "StopRule",
    "Suggestion",
    "TrialRecord",
    "TrialState",
    "after_report",
    "cost_of",
    "log_costs_per_epoch",
    "own_bound",
]
