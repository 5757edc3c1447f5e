"""``python -m benchmarks.ab``: a real A/B test, compared with the verdict that the product shows.

For each kind of training, a job with the callback recurs until it keeps one batch size. Then runs at the default and at
the best size alternate, each pinned by `batch_sizes`. Costs are CPU seconds of
trainings with one thread, so that other load on the machine has little effect.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkError
from benchmarks.recurrences.harness import State, measure, served
from benchmarks.recurrences.plan import Step
from benchmarks.recurrences.runs import Order
from benchmarks.recurrences.tasks import TASKS
from benchmarks.tables import text_table
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import GP_VOI, SavingsView

KINDS = ("digits", "tabular")
_T_90 = {2: 2.920, 3: 2.353, 5: 2.015, 11: 1.796}
"""Two-sided 90 % quantile of Student's t distribution, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of an A/B test: the share that the best size saves, with its 90 % interval, and the costs (CPU s)."""

    low: float
    middle: float
    high: float
    default_s: list[float]
    best_s: list[float]

    @property
    def in_words(self) -> str:
        """The share saved and its interval in words."""
        return f"{self.middle:.0%} ({100 * self.low:.0f} to {self.high:.0%})".replace("%", " %")


def compared(default_s: Sequence[float], best_s: Sequence[float]) -> Compared:
    """Compare pairs of runs by the logarithms of their costs (paired t interval)."""
    logs = [math.log(best / default) for default, best in zip(default_s, best_s, strict=True)]
    mean, reach = statistics.mean(logs), _T_90[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (-math.expm1(mean + each) for each in (reach, 0.0, -reach))
    return Compared(low, middle, high, list(default_s), list(best_s))


def recurrences(kind: str, number: int) -> list[Step]:
    """Return the recurrences of a job with the callback."""
    return [
        Step("recurrence", kind, 0, each, GP_VOI, Order(kind, f"ab-{kind}", seed=10 * each)) for each in range(number)
    ]


def runs_in_turn(kind: str, sizes: tuple[int, int], pairs: int) -> list[Step]:
    """Return alternating runs of two sizes, pinned by `batch_sizes`; both runs of a pair have the same seed."""
    return [
        Step("size", kind, 0, pair, f"only {size}", Order(kind, f"ab-{kind}-{size}", 7000 + pair, size))
        for pair in range(pairs)
        for size in (sizes if pair % 2 else sizes[::-1])
    ]


def ab(kind: str, number: int, pairs: int, state: State) -> tuple[SavingsView, Compared | None]:
    """Let a job recur, then compare its best size with its default (None if the default is the best size).

    Raises:
        BenchmarkError: A training broke, or missed the target.
    """
    measure(recurrences(kind, number), state, say=_say)
    with served(state.directory) as url, BsoClient(url) as client:
        savings = client.show_job(f"ab-{kind}").savings
    default, best = savings.default_batch_size, savings.batch_size
    if best is None or best == default:
        return savings, None
    return savings, ab_test(kind, (default, best), pairs, state)


def ab_test(kind: str, sizes: tuple[int, int], pairs: int, state: State) -> Compared:
    """Train alternately at the default and at the best size, and compare the costs.

    Raises:
        BenchmarkError: A training broke, or missed the target at a pinned size.
    """
    steps = runs_in_turn(kind, sizes, pairs)
    measure(steps, state, say=_say)
    spent: dict[str, list[float]] = {step.who: [] for step in steps}
    for step in sorted(steps, key=lambda step: step.number):
        (record,) = state.of(step.key)
        spent[step.who].append(record["fit_cpu_s"])
    default, best = sizes
    return compared(spent[f"only {default}"], spent[f"only {best}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the A/B tests and print them beside the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ab", description=main.__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help=f"(default: {' '.join(KINDS)})")
    parser.add_argument("--recurrences", type=int, default=40, metavar="N", help="of each job (default: 40)")
    parser.add_argument("--pairs", type=int, choices=[each + 1 for each in _T_90], default=6, help="(default: 6)")
    parser.add_argument("--state", type=Path, default=Path(".proof/ab"), metavar="DIR", help="what was measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args(arguments)
    rows, figures = [["training", "verdict shown", "A/B test"]], list[dict[str, Any]]()
    try:
        for kind in options.kinds:
            savings, found = ab(kind, options.recurrences, options.pairs, State(options.state))
            saved = "the default is the best size" if found is None else found.in_words
            rows.append([TASKS[kind].title, f"{savings.claim}. {savings.evidence}".strip(), saved])
            test = None if found is None else {"default_s": found.default_s, "best_s": found.best_s}
            figures.append({"kind": kind, "savings": savings.model_dump(mode="json"), "ab": test})
    except (BenchmarkError, OSError) as error:
        print(f"benchmarks.ab: {error}", file=sys.stderr)
        return 1
    print(text_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
