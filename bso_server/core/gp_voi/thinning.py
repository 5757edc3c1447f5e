"""Selection of a few batch sizes out of many, so that the work of a decision is bounded.

The mathematics of policy `gp_voi` takes O(B³) steps over B sizes. Beliefs about sizes that differ by a few percent
hardly differ. So a decision on a job with more than `MOST_SIZES` sizes considers only some of them: sizes with
evidence, the neighbours of the cheapest known size, and others spread evenly over the octaves. The selection changes
with the evidence, so that the neighbours close in on the best size. A job with at most `MOST_SIZES` sizes keeps all of
them.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bso_server.core.gp_voi import beliefs as whole
from bso_server.core.gp_voi.beliefs import Belief, Beliefs
from bso_server.core.gp_voi.forecast import available_of
from bso_server.core.model import History, TrialRecord
from zeus_plugins.protocol import CreatedJob

MOST_SIZES = 64
"""Largest number of sizes that one decision considers."""

_MOST_WITH_EVIDENCE = 40
"""Largest number of sizes that are kept for their evidence; the remaining places are for exploration."""

_UNKNOWN = Belief()


def thinned(history: History, *sizes: int) -> History:
    """Return the history with at most `MOST_SIZES` sizes of the job, among them `sizes`, but the arms of all sizes.

    Return `history` itself if the job has at most `MOST_SIZES` sizes, or if no size can run.
    """
    job, beliefs = history.job, history.memory
    if len(job.batch_sizes) <= MOST_SIZES:
        return history
    available = [job.batch_sizes[index] for index in available_of(history)]
    if not available:
        return history
    known = [arm for arm in history.arms.values() if arm.completed.count]
    center = min(known, key=lambda arm: arm.completed.mean).batch_size if known else job.default_batch_size
    in_flight, warm = [trial.batch_size for trial in history.in_flight], job.warm_in_force
    begun = [size for size in available if warm is not None and size == warm.best_batch_size]
    kept = with_evidence(job, beliefs, center, [*sizes, *begun, *in_flight])
    kept |= set(neighbours(available, center)[: MOST_SIZES - len(kept)])
    kept |= set(spread(available, MOST_SIZES - len(kept)))
    return replace(
        history,
        job=_thinned_job(job, kept),
        memory=_thinned_beliefs(job, beliefs, kept),
        in_flight=tuple(trial for trial in history.in_flight if trial.batch_size in kept),
    )


def after(beliefs: Beliefs, job: CreatedJob, trial: TrialRecord) -> Beliefs:
    """Return the beliefs once this trial has ended.

    Sizes without evidence do not influence the result, and keep their beliefs. Sizes beyond the limit of
    `with_evidence` keep their beliefs, too.
    """
    if len(beliefs) <= MOST_SIZES:
        return whole.after(beliefs, job, trial)
    kept = with_evidence(job, beliefs, trial.batch_size, [trial.batch_size])
    few = _thinned_beliefs(job, beliefs, kept)
    changed = dict(zip(sorted(kept), whole.after(few, _thinned_job(job, kept), trial), strict=True))
    return tuple(changed.get(size, belief) for size, belief in zip(job.batch_sizes, beliefs, strict=True))


def with_evidence(job: CreatedJob, beliefs: Beliefs, center: int, first: Sequence[int]) -> set[int]:
    """Return the sizes that are kept for their evidence, at most `_MOST_WITH_EVIDENCE`.

    These are the default, the smallest and the largest size, on which the prior depends; `center`; the sizes `first`;
    and sizes that have had trials. If these sizes are too many, sizes with setbacks precede the other sizes with
    trials. Half of the places that then remain are for the sizes nearest to `center`, and half for sizes spread over
    the octaves.
    """
    seen = [size for size, belief in zip(job.batch_sizes, beliefs, strict=True) if belief != _UNKNOWN]
    unlucky = [size for size, belief in zip(job.batch_sizes, beliefs, strict=True) if belief.setbacks]
    # A dict keeps the order, so that the limit removes the last sizes.
    kept = dict.fromkeys(
        [job.default_batch_size, job.batch_sizes[0], job.batch_sizes[-1], center, *first, *_nearest(unlucky, center)]
    )
    others = _nearest([size for size in seen if size not in kept], center)
    places = max(_MOST_WITH_EVIDENCE - len(kept), 0)
    if len(others) > places:
        near = others[: places // 2]
        others = [*near, *spread(sorted(others[places // 2 :]), places - len(near))]
    return set([*kept, *others][:_MOST_WITH_EVIDENCE])


def neighbours(sizes: Sequence[int], center: int) -> list[int]:
    """Return the sizes 1, 2, 4, 8, … places from `center` in both directions, nearest first; `sizes` are ascending."""
    below = [size for size in reversed(sizes) if size < center]
    above = [size for size in sizes if size > center]
    steps = [2**power - 1 for power in range(len(sizes).bit_length())]
    return [side[step] for step in steps for side in (below, above) if step < len(side)]


def spread(sizes: Sequence[int], places: int) -> list[int]:
    """Return the sizes nearest to `places` points that are spread evenly over the octaves; each once, ascending."""
    if places < 2 or not sizes:
        return list(sizes[: max(places, 0)])
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    points = [2 ** (low + (high - low) * number / (places - 1)) for number in range(places)]
    around = [(max(bisect(sizes, point) - 1, 0), point) for point in points]
    return sorted({_nearest(sizes[place : place + 2], point)[0] for place, point in around})


def _nearest(sizes: Iterable[int], center: float) -> list[int]:
    """Return the sizes in order of their distance from `center` in octaves."""
    return sorted(sizes, key=lambda size: abs(math.log2(size / center)))


def _thinned_job(job: CreatedJob, kept: set[int]) -> CreatedJob:
    return job.model_copy(update={"batch_sizes": tuple(sorted(kept))})


def _thinned_beliefs(job: CreatedJob, beliefs: Beliefs, kept: set[int]) -> Beliefs:
    return tuple(belief for size, belief in zip(job.batch_sizes, beliefs, strict=True) if size in kept)
