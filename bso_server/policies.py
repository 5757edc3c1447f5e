"""Public names for policies in other packages; docs/policy-custom.md has an example.

These names do not change within a minor version. Everything else in `bso_server` may change at any time.
"""

from bso_server.core.model import (
    OBSERVED,
    Arm,
    Cheapest,
    EpochBound,
    Expectations,
    ExpectedCost,
    History,
    Report,
    Statistics,
    Suggestion,
    TrialRecord,
    after_report,
    cost_of,
    log_costs_per_epoch,
)
from bso_server.core.policy import GROUP, Memory, Policy, own_bound
from bso_server.core.quality import left_out
from bso_server.errors import InvalidJobError, NoSurvivorError
from zeus_plugins.protocol import (
    CandidateWorth,
    CreatedJob,
    Decision,
    EndReason,
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
    "CreatedJob",
    "Decision",
    "EndReason",
    "EpochBound",
    "Expectations",
    "ExpectedCost",
    "History",
    "InvalidJobError",
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
    "left_out",
    "log_costs_per_epoch",
    "own_bound",
]
