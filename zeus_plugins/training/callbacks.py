"""The parts of the callbacks that are the same in every framework: their arguments, and what they have found out.

Each callback's own docstring describes the arguments to its users.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import SecretStr

from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import OptimumSelector, PowerLimitDevice, PowerLimitProfile, ZeusCost
from zeus_plugins.protocol import JobSpec, PowerLimitChoice
from zeus_plugins.training.configured import as_job, revealed
from zeus_plugins.training.defaults import JobWish
from zeus_plugins.training.energy_run import EnergyRun
from zeus_plugins.training.entry import OnUnreachable
from zeus_plugins.training.options import TrialOptions
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.power_run import PowerOptions, PowerRun
from zeus_plugins.training.run import TrialRun


class BatchSizeArguments:
    """Of a batch-size callback."""

    def __init__(
        self,
        job: JobSpec | Mapping[str, Any] | None = None,
        monitor: str | None = None,
        *,
        target: float | None = None,
        job_id: str | None = None,
        higher_is_better_metric: bool | None = None,
        server_url: str | None = None,
        token: SecretStr | str | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        max_per_device_batch_size: int | None = None,
        on_failure: Literal["raise", "stop"] = "raise",
        on_unreachable: OnUnreachable = "default",
        strict: bool = False,
        quiet: bool = False,
    ) -> None:
        if monitor is None:
            raise ZeusBSOConfigError("which metric is the target about? Say monitor=…, the name that it is logged by")
        self._wish = JobWish(
            job=None if job is None else as_job(job),
            monitor=monitor,
            target=target,
            job_id=job_id,
            higher_is_better_metric=higher_is_better_metric,
        )
        self._metric_name = monitor
        self._options = TrialOptions(
            server_url=server_url,
            token=revealed(token),
            lr_scaling=lr_scaling,
            energy_monitor=energy_monitor,
            max_per_device_batch_size=max_per_device_batch_size,
            on_failure=on_failure,
            on_unreachable=on_unreachable,
            strict=strict,
            quiet=quiet,
        )
        self._run = TrialRun(self._wish, self._options)

    @property
    def lr_factor(self) -> float:
        """The factor on learning rates that goes with the trial's batch size, by `lr_scaling`; 1 before it is known."""
        return self._run.lr_factor

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the server keep what a power-limit callback found out; called on the first of all processes."""
        self._run.keep_power_limits(choice)


class EnergyTotals:
    """Of an energy callback."""

    def __init__(self, energy_monitor: EnergyMonitor | WindowMonitor | None = None) -> None:
        self._energy_monitor = energy_monitor
        self._run = EnergyRun()

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 on other processes than the first."""
        return self._run.time_s

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._run.energy_j


class PowerLimitFindings:
    """Of a power-limit callback."""

    def __init__(
        self,
        selector: OptimumSelector | None = None,
        *,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        wait_steps: int = 0,
        warmup_s: float = 0.5,
        profile_s: float = 2.0,
        limits_w: Sequence[float] | None = None,
        profile_path: str | os.PathLike[str] | None = None,
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        devices: Sequence[PowerLimitDevice] | None = None,
        command: str | None = None,
    ) -> None:
        self._options = PowerOptions(
            selector or ZeusCost(),
            warmup_steps,
            profile_steps,
            limits_w,
            profile_path,
            energy_monitor,
            devices,
            command,
            wait_steps,
            warmup_s,
            profile_s,
        )
        self._run: PowerRun | None = None
        # Hooks that the trainer does not call any more.
        self._hidden = Patches()

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known, and when no limit could be set."""
        return None if self._run is None else self._run.chosen_limit_w

    @property
    def profile(self) -> PowerLimitProfile | None:
        """The limits that the latest training has measured, and those known from the server or `profile_path`."""
        return None if self._run is None else self._run.profile

    def _end(self) -> None:
        self._hidden.undo()
        if self._run is not None:
            self._run.close()
