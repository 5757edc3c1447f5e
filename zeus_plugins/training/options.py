"""The arguments of a batch-size callback that are no part of its job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.entry import OnUnreachable, check_on_unreachable
from zeus_plugins.training.lr_scaling import lr_factor


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The arguments that the batch size callbacks of all frameworks share; they describe them.

    Raises:
        ZeusBSOConfigError: One of them cannot work.
    """

    server_url: str | None = None
    token: str | None = field(default=None, repr=False)
    lr_scaling: str = "none"
    energy_monitor: EnergyMonitor | WindowMonitor | None = None
    max_per_device_batch_size: int | None = None
    on_failure: Literal["raise", "stop"] = "raise"
    on_unreachable: OnUnreachable = "default"
    strict: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "stop"):
            raise ZeusBSOConfigError(f"on_failure is {self.on_failure!r}: choose 'raise' or 'stop'")
        if self.max_per_device_batch_size is not None and self.max_per_device_batch_size < 1:
            raise ZeusBSOConfigError(f"max_per_device_batch_size is {self.max_per_device_batch_size}: it is at least 1")
        check_on_unreachable(self.on_unreachable)
        lr_factor(self.lr_scaling, 1, 1)  # there is such a rule, or it raises
