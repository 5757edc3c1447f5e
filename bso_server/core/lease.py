"""How long a trial that is not heard of counts as alive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """The lengths of leases.

    Attributes:
        heartbeat_interval_s: How often a training that sends heartbeats should send one.
        heartbeat_lease_s: Lease of a training that does: several heartbeats may be lost.
        silent_lease_s: Least lease of a training that only reports, such as a Zeus client's.
        gaps: Such a training gets at least so many times its longest time between two reports.
        suspended_lease_s: How long a preempted training may take to come back.
    """

    heartbeat_interval_s: float = 30.0
    heartbeat_lease_s: float = 180.0
    silent_lease_s: float = 3600.0
    gaps: float = 5.0
    suspended_lease_s: float = 86400.0

    def lease_s(self, *, heartbeats: bool, longest_gap_s: float) -> float:
        """Seconds that a running trial may be silent.

        Args:
            heartbeats: Whether its training has ever sent a heartbeat.
            longest_gap_s: Longest time between two of its reports so far, seconds.
        """
        if heartbeats:
            return self.heartbeat_lease_s
        return max(self.silent_lease_s, self.gaps * longest_gap_s)
