"""The results of a check, and what is expected of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, zip_longest
from statistics import median
from textwrap import wrap
from typing import Any


class Verdict(StrEnum):
    """The meaning of a result for a training's figures."""

    OK = "ok"
    DOUBTFUL = "doubtful"
    """Figures may be wrong, or something will not work."""
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """One thing that was looked at on one GPU, or on the machine, in words; and its figures for programs."""

    check: str
    expected: str
    found: str
    verdict: Verdict
    gpu: str = ""
    details: dict[str, Any] = field(default_factory=dict)


LONGEST_PERIOD_S = 0.15
"""A counter is expected to move more often: 20 to 100 ms were seen on Volta and newer."""

AGREEMENT = {"idle": 0.2, "load": 0.1, "bursts": 0.2}
"""The largest distance of energy by power readings from the counter's, as a part of it.

Both come from the same sensor, so they agree or one is misread. Under bursts, and at rest, the ends of the measurement
and the averaging of power readings weigh more.
"""


def period_result(gpu: str, what: str, periods_s: list[float], span_s: float) -> Result:
    """The period of a reading, of which these are the seconds between two moves."""
    expected = f"moves every {1000 * LONGEST_PERIOD_S:g} ms or more often"
    if not periods_s:
        found, verdict, details = f"has not moved twice in {span_s:.2g} s", Verdict.DOUBTFUL, {}
    else:
        middle_s, longest_s = median(periods_s), max(periods_s)
        found = f"every {1000 * middle_s:.3g} ms in the median, {1000 * longest_s:.3g} ms at most"
        verdict = Verdict.OK if middle_s <= LONGEST_PERIOD_S else Verdict.DOUBTFUL
        details = {"median_s": middle_s, "longest_s": longest_s, "moves": len(periods_s)}
    return Result(f"period of the {what}", expected, found, verdict, gpu, details)


@dataclass(frozen=True)
class Span:
    """The energy of one span of time, joules: by the counter, and by mean and instant power readings, integrated.

    None where the driver does not tell it.
    """

    time_s: float
    counter_j: float
    mean_j: float | None
    instant_j: float | None


def agreement_result(gpu: str, phase: str, span: Span) -> Result:
    """The agreement of the counter and the power readings on a phase."""
    allowed = AGREEMENT[phase]
    expected = f"power readings within {allowed:.0%} of the counter"
    details = vars(span) | {"allowed": allowed}
    if span.counter_j <= 0:
        found = f"the counter rose by {span.counter_j:g} J in {span.time_s:.3g} s"
        return Result(f"energy, {phase}", expected, found, Verdict.DOUBTFUL, gpu, details)
    told, worst = [f"{span.counter_j / span.time_s:.4g} W by the counter"], 0.0
    for name, joules in (("mean", span.mean_j), ("instant", span.instant_j)):
        if joules is None:
            told.append(f"no {name} power")
            continue
        difference = joules / span.counter_j - 1
        worst = max(worst, abs(difference))
        told.append(f"{name} power {difference:+.1%}")
    is_alone = span.mean_j is None and span.instant_j is None
    verdict = Verdict.SKIPPED if is_alone else Verdict.OK if worst <= allowed else Verdict.DOUBTFUL
    return Result(f"energy, {phase}", expected, ", ".join(told), verdict, gpu, details)


def synchronization_result(gpu: str, returned_s: float, done_s: float) -> Result:
    """The part of queued work that a window would miss that ends when its last call has returned."""
    missed = max(0.0, 1 - returned_s / done_s) if done_s > 0 else 0.0
    return Result(
        "queued work",
        "calls return before their work is done: a window has to wait for it",
        f"{missed:.0%} of the work was still to do when its calls had returned; the callbacks wait for it",
        Verdict.OK,
        gpu,
        {"returned_s": returned_s, "done_s": done_s, "missed": missed},
    )


def mapping_result(form: str, cuda: list[str] | None, ours: list[str] | None, problem: str | None) -> Result:
    """The agreement of CUDA and this package on the GPUs that a form of the variable means."""
    expected = "CUDA and this package mean the same GPUs"
    details = {"cuda": cuda, "ours": ours}
    if problem is not None:
        return Result(f"mapping by {form}", expected, problem, Verdict.SKIPPED, details=details)
    is_same = [_bare(uuid) for uuid in cuda or ()] == [_bare(uuid) for uuid in ours or ()] != []
    found = f"both: {', '.join(ours or ())}" if is_same else f"CUDA: {cuda}, this package: {ours}"
    return Result(f"mapping by {form}", expected, found, Verdict.OK if is_same else Verdict.DOUBTFUL, details=details)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-")


def table(results: list[Result]) -> str:
    """The results as lines for people, GPU by GPU: columns of which the wide ones are wrapped."""
    head = Result("check", "expected", "found", Verdict.OK)
    lines = _row("verdict", head)
    for gpu, group in groupby(results, key=lambda each: each.gpu):
        lines += ["", gpu or "this machine"]
        for each in group:
            lines += _row(each.verdict, each)
    return "\n".join(lines)


_WIDTHS = (8, 28, 48, 40)
"""Columns: verdict, check, found, expected."""


def _row(verdict: str, result: Result) -> list[str]:
    cells = [
        wrap(text, width, break_on_hyphens=False)
        for text, width in zip((verdict, result.check, result.found, result.expected), _WIDTHS, strict=True)
    ]
    return [
        "  ".join(part.ljust(width) for part, width in zip(parts, _WIDTHS, strict=True)).rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]
