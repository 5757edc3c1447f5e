"""The assumptions of policy `gp_voi`, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpVoiConstants:
    """The numbers of policy `gp_voi`; chosen on the data named in docs/policy.md. σ is short for standard deviation.

    Lengths are in octaves of the batch size. A strength is the shape of a gamma distribution: 2 is 4 runs' worth.
    """

    # What is expected of log epochs to the target beforehand, by `laws`.
    level_variance: float = 9.0  # variance of the level, of epochs and of their cost: so large that it is flat
    critical_step: float = 0.75  # between the critical batch sizes that are thought of
    exponents: tuple[float, ...] = (0.5, 1.0)  # by which epochs rise beyond them
    flat_chance: float = 0.15  # of no rise at all
    too_small_chance: float = 0.3  # that some sizes are too small to get anywhere
    smooth_sd: float = 0.12  # σ of what the laws leave, the part that is smooth in log2 of the batch size
    smooth_length: float = 3.0  # length scale of that part
    arm_sd: float = 0.05  # σ of the part that is each batch size's own
    lawless_chance: float = 0.003  # that a job follows no law, and the same three of it then
    lawless_sd: float = 0.5
    lawless_length: float = 4.0
    lawless_arm_sd: float = 0.4
    break_chance: float = 0.05  # that a size which was not seen breaks the laws,
    break_sd: float = 0.7  # and by how much, in σ of its log epochs
    divergence: float = 0.03  # hazard, per octave beyond the sizes that reach the target, that one never does

    # What is expected of the log cost of an epoch.
    saturation_step: float = 0.75  # between the sizes of saturation that are thought of
    cost_sd: float = 0.15  # as above, the same three
    cost_length: float = 4.0
    cost_arm_sd: float = 0.03

    # From run to run at one size.
    run_sd: float = 0.08  # prior guess of the σ of log epochs
    run_sd_strength: float = 2.0  # how much that guess weighs
    least_run_sd: float = 0.02  # that σ is never taken to be smaller
    cost_run_sd: float = 0.015  # prior median of the σ of the log cost of an epoch,
    cost_run_sd_spread: float = 1.2  # and σ of its log
    cost_run_sds: tuple[float, ...] = (0.01, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)  # the values that are thought of
    slowed_chance: float = 0.02  # that a run is slowed,
    slowed_sd: float = 1.0  # and by how much: σ of its log cost
    epoch_sd: float = 0.06  # prior guess of the σ of what an epoch costs within a run, as a share of the mean
    epoch_sd_freedom: float = 2.0  # degrees of freedom that this guess is worth
    first_epoch_sd: float = 0.5  # of what is left when a first epoch's cost is divided by a start-up seen elsewhere
    most_cost_runs: int = 8  # runs of a size that count for the cost of its epochs, so that a change is followed
    startup_sd: float = 0.2  # σ between sizes of the log of what the first epoch of a first run costs more
    scale_dof: float = 4.0  # degrees of freedom of the Student-t process: the fewer, the sooner surprises widen beliefs
    largest_scale: float = 16.0  # they are never widened by more than this factor of variance

    # What a try is worth.
    samples: int = 128  # joint samples of what is believed
    candidates: int = 3  # sizes that are weighed,
    open_horizon: float = 10.0  # and, from this horizon on, more and more doubtful ones, and one that was never run
    tries_at_once: int = 4  # trials under way elsewhere than at the incumbent, from which on nothing else is tried
    first_horizon: float = 5.0  # future recurrences that a first decision counts on
    horizon_growth: float = 0.5  # by how much every recurrence that is over raises that number
    largest_cost: float = 2.5  # of a later run, in runs of the incumbent: worse is not worth telling apart
    least_worth: float = 0.01  # of a try, in runs of the incumbent,
    least_saving: float = 0.002  # and of later runs, if a size has reached the target before: else it is not tried
    long_horizon: float = 55.0  # from here on, the 100th recurrence, tries get as far as a run of the incumbent costs,
    check_interval: int = 25  # and after each so many recurrences a size is tried that never got so far
    further: float = 1.25  # a size that was stopped is tried again for so many times the epochs that it has survived
    stop_shares: tuple[float, ...] = (
        0.35,
        0.5,
        0.7,
        0.85,
        1.0,
        1.2,
        1.5,
    )  # of such a run, at which a try may be stopped

    # When the incumbent is stopped.
    incumbent_allowance: float = 2.0  # it gets so many times the epochs that it is expected to need,
    incumbent_sds: float = 4.0  # and at least so many σ more

    # When the job has changed, and what is remembered.
    failure_prior: float = 0.02  # pseudo-count of runs that fail, per size (Beta prior),
    success_prior: float = 1.0  # and of runs that do not
    streak_chance: float = 0.005  # of a row of failures; a less probable one means that the job has changed
    drift_sds: float = 3.0  # so do two runs of a size in a row, so far from what was expected, or one twice as far
    kept_weight: float = 0.2  # what is left of each size's observations (in runs) after such a change
    forgetting: float = 0.997  # what is left of each observation's weight after each recurrence


CONSTANTS = GpVoiConstants()
