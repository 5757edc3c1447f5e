"""Numbers in words, for reasons and explanations."""

from __future__ import annotations

from zeus_plugins.protocol import CreatedJob, StopRule, joules_in_words

BAND_SDS = 1.645
"""A normal variable lies within this number of σ around its mean with a probability of 90 %."""

# Upper limit of a probability, and its name.
_CHANCES = (
    (0.02, "hardly any chance"),
    (0.07, "about a one-in-twenty chance"),
    (0.14, "about a one-in-ten chance"),
    (0.22, "about a one-in-five chance"),
    (0.29, "about a quarter chance"),
    (0.41, "about a third chance"),
    (0.59, "about an even chance"),
    (0.71, "about a two-in-three chance"),
    (0.85, "about a three-in-four chance"),
    (0.97, "a good chance"),
)


def chance_in_words(chance: float) -> str:
    """Describe a probability, for example as ``about a third chance``."""
    return next((words for least, words in _CHANCES if chance < least), "almost every chance")


def advice_in_words(job: CreatedJob) -> str:
    """Return advice for a job of which every batch size has missed the target."""
    return f"{'lower' if job.higher_is_better_metric else 'raise'} the target or raise max_epochs"


def stop_in_words(rule: StopRule | None, max_epochs: int, because: str | None = None) -> str:
    """Describe when a trial is stopped; empty if only the job's `max_epochs` stops it.

    `because` is the reason for the bound on the trial's epochs.
    """
    if rule is None:
        return ""
    if rule.max_epochs < max_epochs:
        epochs = "1 epoch" if rule.max_epochs == 1 else f"{rule.max_epochs} epochs"
        return f"stop it after {epochs} unless it has reached the target{f': {because}' if because else ''}"
    if rule.max_cost_j is not None:
        return f"stop it at {joules_in_words(rule.max_cost_j)} unless it has reached the target"
    return ""
