"""The settings that a script's environment gives its loader, usually set by the master that launched it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training import environment


@dataclass(frozen=True)
class Settings:
    """The environment variables of a launched run, read.

    `profile_steps` are those of warm-up and of measurement for each power limit; without them limits are left alone. If
    it `is_observed`, the best limit is only looked for, and not set.
    """

    log_dir: Path
    job_id: str
    cost_thresh_j: float
    eta: float
    target_metric: float
    profile_steps: tuple[int, int] | None
    is_observed: bool

    @classmethod
    def of(cls, environ: Mapping[str, str] | None) -> Settings:
        """Read the variables; one that cannot work, or a missing target, is a `ZeusBSOConfigError`."""
        target = environment.TARGET_METRIC.number(environ)
        if target is None:
            raise ZeusBSOConfigError(
                f"{environment.TARGET_METRIC} is not set: set it to the value of the validation metric to reach"
            )
        eta = environment.ETA_KNOB.number(environ)
        if eta is not None and not 0 <= eta <= 1:
            raise ZeusBSOConfigError(f"{environment.ETA_KNOB} is {eta}: η lies between 0 and 1")
        threshold_j = environment.COST_THRESHOLD_J.number(environ)
        return cls(
            log_dir=Path(environment.LOG_DIR.text(environ) or "zeus_log"),
            job_id=environment.JOB_ID.text(environ) or "rec01+try01",
            cost_thresh_j=math.inf if threshold_j is None else threshold_j,
            eta=0.5 if eta is None else eta,
            target_metric=target,
            profile_steps=_profile_steps(environ),
            is_observed=_is_observed(environ),
        )


def _profile_steps(environ: Mapping[str, str] | None) -> tuple[int, int] | None:
    text = environment.PROFILE_STEPS.text(environ)
    if not text:
        return None
    try:
        warmup, measure = (int(part) for part in text.split(","))
    except ValueError:
        raise ZeusBSOConfigError(
            f"{environment.PROFILE_STEPS} is {text!r}: set it to two whole numbers of steps, warm-up,measurement"
        ) from None
    return warmup, measure


def _is_observed(environ: Mapping[str, str] | None) -> bool:
    text = environment.USE_BEST_POWER_LIMIT.text(environ) or "True"
    if text not in ("True", "False"):
        raise ZeusBSOConfigError(f"{environment.USE_BEST_POWER_LIMIT} is {text!r}: set it to True or False")
    return text == "False"
