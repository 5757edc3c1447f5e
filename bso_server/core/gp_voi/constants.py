"""The assumptions of policy `gp_voi`, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpVoiConstants:
    """The numbers of policy `gp_voi`; chosen on the traces named in docs/policy.md. σ is short for standard deviation.

    Attributes:
        level_variance: Prior variance of the level of log epochs and of log cost per epoch: so large that it is flat.
        smooth_sd: Prior σ of log epochs around their level, the part that is smooth in log2 of the batch size.
        smooth_length: Length scale of that part, octaves.
        arm_sd: Prior σ of log epochs that is each batch size's own.
        cost_sd: Prior σ of the log cost per epoch around its level.
        cost_length: Length scale of that, octaves.
        cost_arm_sd: Prior σ of the log cost per epoch that is each batch size's own.
        cost_run_sd: Prior guess of the σ of the log cost per epoch from run to run at one size.
        cost_run_sd_strength: How much that guess weighs, as `run_sd_strength`.
        least_cost_run_sd: That σ is never taken to be smaller.
        report_variance: Variance of that log cost from report to report, in multiples of that from run to run.
        most_cost_runs: So many runs of a size at most count for what its epochs cost, so that a change is followed.
        first_epoch_weight: What a run says of the cost of epochs of which only the first is known, start-up included.
        startup_sd: σ between batch sizes of the log of what the first epoch of a first run costs more than later ones.
        run_sd: Prior guess of the σ of log epochs from run to run at one size.
        run_sd_strength: How much that guess weighs: the shape of a gamma distribution; 2 is 4 runs' worth.
        least_run_sd: That σ is never taken to be smaller.
        scale_dof: Degrees of freedom of the Student-t process: the smaller, the sooner surprises widen all posteriors.
        largest_scale: They are never widened by more than this factor (of variance).
        near_octaves: Sizes so near to one that reaches the target may be tried; seldom are sizes exact powers of two.
        trend_octaves: Sizes so near to the incumbent may be tried, on its far side as seen from the default,
        trend_log_cost: where costs have fallen by so much at least on the way from there (log of a factor).
        first_horizon: How many future recurrences a first decision counts on.
        horizon_growth: By how much every recurrence that is over raises that number.
        largest_loss: A try costs at most so many incumbent's runs more than the incumbent, for it would be stopped.
        least_chance: A try is up for being stopped when its chance to beat the incumbent falls below this.
        incumbent_allowance: The incumbent gets at least so many times the epochs that it is expected to need,
        incumbent_sds: and at least so many σ more.
        failure_prior: Pseudo-count of runs that fail, per size (Beta prior),
        success_prior: and of runs that do not.
        streak_chance: Failures in a row that are less probable than this mean that the job has changed.
        drift_sds: Two runs of a size in a row, so many σ from what was expected, mean that, too; one, at twice as many.
        kept_weight: What is left of each size's observations (in runs) after such a change.
        forgetting: What is left of each observation's weight after each recurrence.
    """

    level_variance: float = 9.0
    smooth_sd: float = 0.4
    smooth_length: float = 4.0
    arm_sd: float = 0.05
    cost_sd: float = 1.0
    cost_length: float = 8.0
    cost_arm_sd: float = 0.03
    cost_run_sd: float = 0.015
    cost_run_sd_strength: float = 0.5
    least_cost_run_sd: float = 0.01
    report_variance: float = 3.0
    most_cost_runs: float = 8.0
    first_epoch_weight: float = 0.01
    startup_sd: float = 0.2
    run_sd: float = 0.08
    run_sd_strength: float = 2.0
    least_run_sd: float = 0.02
    scale_dof: float = 4.0
    largest_scale: float = 16.0
    near_octaves: float = 1.01
    trend_octaves: float = 2.01
    trend_log_cost: float = 0.1
    first_horizon: float = 5.0
    horizon_growth: float = 0.5
    largest_loss: float = 1.0
    least_chance: float = 0.15
    incumbent_allowance: float = 2.0
    incumbent_sds: float = 4.0
    failure_prior: float = 0.02
    success_prior: float = 1.0
    streak_chance: float = 0.005
    drift_sds: float = 3.0
    kept_weight: float = 0.2
    forgetting: float = 0.997


CONSTANTS = GpVoiConstants()
