"""The assumptions of policy `gp_voi`, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpVoiConstants:
    """The numbers of policy `gp_voi`; chosen on the traces named in docs/policy.md. σ is short for standard deviation.

    Lengths are in octaves of the batch size. A strength is the shape of a gamma distribution: 2 is 4 runs' worth.
    """

    # Priors over batch sizes: of log epochs to the target, and of log cost per epoch.
    level_variance: float = 9.0  # variance of the level of either: so large that it is flat
    smooth_sd: float = 0.4  # σ of log epochs around their level, the part that is smooth in log2 of the batch size
    smooth_length: float = 4.0  # length scale of that part
    arm_sd: float = 0.05  # σ of log epochs that is each batch size's own
    cost_sd: float = 1.0  # σ of log cost per epoch around its level
    cost_length: float = 8.0  # length scale of that
    cost_arm_sd: float = 0.03  # σ of log cost per epoch that is each batch size's own

    # From run to run at one size.
    run_sd: float = 0.08  # prior guess of the σ of log epochs
    run_sd_strength: float = 2.0  # how much that guess weighs
    least_run_sd: float = 0.02  # that σ is never taken to be smaller
    cost_run_sd: float = 0.015  # the same three of log cost per epoch
    cost_run_sd_strength: float = 0.5
    least_cost_run_sd: float = 0.01
    report_variance: float = 3.0  # of log cost from report to report, in multiples of that from run to run
    most_cost_runs: float = 8.0  # runs of a size that count for the cost of its epochs, so that a change is followed
    first_epoch_weight: float = 0.01  # of a run of which only the first epoch's cost is known, start-up included
    startup_sd: float = 0.2  # σ between sizes of the log of what the first epoch of a first run costs more
    scale_dof: float = 4.0  # degrees of freedom of the Student-t process: the fewer, the sooner surprises widen beliefs
    largest_scale: float = 16.0  # they are never widened by more than this factor of variance

    # What may be tried, and what it is worth.
    near_octaves: float = 1.01  # from a size that reaches the target; seldom are sizes exact powers of two
    trend_octaves: float = 2.01  # from the incumbent, on its far side as seen from the default,
    trend_log_cost: float = 0.1  # where costs have fallen by so much at least on the way from there (log of a factor)
    first_horizon: float = 5.0  # future recurrences that a first decision counts on
    horizon_growth: float = 0.5  # by how much every recurrence that is over raises that number
    largest_loss: float = 1.0  # of a try, in runs of the incumbent, for it would be stopped

    # When a run is stopped.
    least_chance: float = 0.15  # a try is up for it when its chance to beat the incumbent falls below this
    incumbent_allowance: float = 2.0  # the incumbent gets so many times the epochs that it is expected to need,
    incumbent_sds: float = 4.0  # and at least so many σ more

    # When the job has changed, and what is remembered.
    failure_prior: float = 0.02  # pseudo-count of runs that fail, per size (Beta prior),
    success_prior: float = 1.0  # and of runs that do not
    streak_chance: float = 0.005  # of a row of failures; a less probable one means that the job has changed
    drift_sds: float = 3.0  # so do two runs of a size in a row, so far from what was expected, or one twice as far
    kept_weight: float = 0.2  # what is left of each size's observations (in runs) after such a change
    forgetting: float = 0.997  # what is left of each observation's weight after each recurrence


CONSTANTS = GpVoiConstants()
