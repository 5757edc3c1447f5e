"""Verdict on the counts of all ranks of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIZE = 48


def verdict_of(ranks: Sequence[Mapping[str, Any]], size: int = SIZE) -> str:
    """Return ``as reported``, ``refused: …``, or ``SILENT: …`` for a training reported at a size not used."""
    refusals = {rank["refusal"] for rank in ranks}
    if None not in refusals:
        return f"refused: {ranks[0]['refusal']}"
    if len(refusals) > 1:
        return f"SILENT: only some of the ranks were refused: {refusals}"
    wrong = sorted({rank["wrong"] for rank in ranks if rank["wrong"]})
    if wrong:
        return f"SILENT: {', '.join(wrong)}"
    epochs = [
        [sum(steps) for steps in zip(*parts, strict=True)]
        for parts in zip(*(rank["steps"] for rank in ranks), strict=True)
    ]
    if not any(epochs):
        return "SILENT: nothing was trained"
    bad = [steps for number, steps in enumerate(epochs) if not _is_right(steps, size, is_first=number == 0)]
    return f"SILENT: steps of {bad} samples" if bad else f"as reported, {len(epochs)} epochs"


def _is_right(steps: Sequence[int], size: int, *, is_first: bool) -> bool:
    """Return True if the steps of an epoch have `size` samples, with unavoidable exceptions.

    The last step has the remainder. If the end of an epoch is unknown, the trainer itself puts the remainder into the
    first step of the next epoch.
    """
    if not steps:
        return True
    first, *others = steps
    fits = first == size or (not is_first and size < first < 2 * size)
    return fits and not set(others[:-1]) - {size} and all(0 < last <= size for last in others[-1:])
