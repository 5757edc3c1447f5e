"""``python -m benchmarks.honesty``: would an A/B test confirm the product's verdicts about savings?

Each simulated job explores five batch sizes and then recurs, with control runs where `bso_server.core.verdict` asks for
them. A reader looks at the verdict after each of 100 runs. In an A/A job all sizes cost the same, so that each "saves"
or "loses" is wrong; in an A/B job the best size saves a known share.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import text_table
from bso_server.core.verdict import Evidence, Run, Verdict, is_control_due
from zeus_plugins.protocol import BUSY_SHARE, CONTROLS, GP_VOI, CreatedJob, SavingsWord, Share

RUNS = 100
LOOKS = (10, 20, 30, 50, 100)
FRONTIER = ("noise 20 %", "default's noise ×3", "10%, noise 5%", "30%, noise 20%", "60%, noise 20%")
"""Kinds of jobs with which `--budgets` compares budgets of control runs."""
_SIZES, _DEFAULT = 5, 0
_WANDER = 0.05
"""Probability that the policy tries another size in a run after its exploration."""
_BUSY = math.log(1 / (1 - BUSY_SHARE))
"""A run is on a busy machine if the log of its cost factor is at least this."""
_STOP_AT = 1.5
"""A run of the exploration is stopped half-way if it would cost more than this multiple of the cheapest run."""

Floats = NDArray[np.float64]
Pace = Callable[[np.random.Generator], Floats]
"""Function that draws, for each run of a job, the log of a factor on the cost per epoch."""


def _steady(_rng: np.random.Generator) -> Floats:
    return np.zeros(RUNS)


def _load(rng: np.random.Generator) -> Floats:
    """Draw the load of another user as an AR(1) process, clipped to factors between 1 and 10 on the cost."""
    shocks = 1.2 * rng.standard_normal(RUNS)
    values = [shocks[0]]
    for shock in shocks[1:]:
        values.append(0.8 * values[-1] + 0.6 * shock)
    excess: Floats = np.clip(np.array(values), 0.0, math.log(10))
    return excess


def _first_slow(_rng: np.random.Generator) -> Floats:
    return np.where(np.arange(RUNS) == 0, math.log(10), 0.0)


def _drift(rng: np.random.Generator) -> Floats:
    return np.linspace(0.0, math.log(rng.choice([0.5, 1.5])), RUNS)


def _step(rng: np.random.Generator) -> Floats:
    return np.where(np.arange(RUNS) >= rng.integers(8, RUNS - 8), math.log(rng.choice([0.5, 2.0])), 0.0)


def _growth(_rng: np.random.Generator) -> Floats:
    return np.log(np.linspace(1.0, 3.0, RUNS))


def _every_fourth(rng: np.random.Generator) -> Floats:
    return np.where(np.arange(RUNS) % 4 == rng.integers(4), math.log(1.5), 0.0)


@dataclass(frozen=True, slots=True)
class World:
    """The true parameters of a kind of jobs.

    Attributes:
        name: Name in the table.
        noise: σ of the log cost from run to run: 0.8 times this in the epochs, 0.6 times in the cost of an epoch.
        saving: Share of the default's cost that a run at the best size saves.
        pace: How the machine's speed or the amount of data changes from run to run.
        default_spread: Ratio of σ of runs at the default to σ of runs at other sizes.
        marks_busy: Whether runs are marked as on a busy machine if `pace` is at least `_BUSY`.
        is_always_busy: Whether all runs are marked as runs on a busy machine.
        epochs_noise: Upper bound of σ of log epochs, which each job draws uniformly from 0; None: 0.8 times `noise`.
        epochs_part: Share of the log cost difference of two sizes that comes from their epochs; the rest comes from the
            cost of an epoch. If below 0, the cheaper size needs more epochs, each of them much cheaper.
    """

    name: str
    noise: float = 0.2
    saving: float = 0.0
    pace: Pace = _steady
    default_spread: float = 1.0
    epochs_noise: float | None = None
    marks_busy: bool = False
    is_always_busy: bool = False
    epochs_part: float = -0.5

    def costs(self, rng: np.random.Generator) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
        """Draw a job.

        Returns:
            Epochs and costs (J) by run and size, the ratio of each size's mean cost to the default's, and for each run
            whether it is marked as on a busy machine.
        """
        gain = math.log1p(-self.saving)
        relative = np.array([0.0, gain / 2, gain, 0.3, 0.8]) if self.saving else np.zeros(_SIZES)
        epochs_noise = 0.8 * self.noise if self.epochs_noise is None else rng.uniform(0, self.epochs_noise)
        rate_noise = 0.6 * self.noise if self.epochs_noise is None else 0.05
        spread = np.ones(_SIZES)
        spread[_DEFAULT] = self.default_spread

        def noise(sd: float) -> Floats:
            # The second term keeps the mean cost the same for every spread.
            return sd * spread * rng.standard_normal((RUNS, _SIZES)) - sd**2 * (spread**2 - 1) / 2

        epochs = 20 * np.exp(noise(epochs_noise) + self.epochs_part * relative)
        rates, pace = noise(rate_noise), self.pace(rng)
        rate = 1e5 * np.exp(rates + (1 - self.epochs_part) * relative + pace[:, None])
        return epochs, epochs * rate, np.exp(relative), self.is_always_busy | (self.marks_busy & (pace >= _BUSY))


EQUAL = (
    World("noise 5 %", noise=0.05),
    World("noise 20 %"),
    World("noise 60 %", noise=0.6),
    World("load up to ×10", pace=_load),
    World("load up to ×10, marked", pace=_load, marks_busy=True),
    World("first run ×10", pace=_first_slow),
    World("drift ±50 %", pace=_drift),
    World("step ×2", pace=_step),
    World("data grow ×3", pace=_growth),
    World("every fourth run ×1.5", pace=_every_fourth),
    World("epochs vary 0–60 %", epochs_noise=0.6),
    World("default's noise ×3", default_spread=3.0),
    World("always busy", is_always_busy=True),
)
SAVING = (
    *(World(f"{s:.0%}, noise {n:.0%}", saving=s, noise=n) for s in (0.1, 0.3, 0.6) for n in (0.05, 0.2, 0.6)),
    World("30%, load up to ×10", saving=0.3, pace=_load),
    World("30%, load up to ×10, marked", saving=0.3, pace=_load, marks_busy=True),
    World("30%, drift ±50 %", saving=0.3, pace=_drift),
    World("30%, always busy", saving=0.3, is_always_busy=True),
    World("50%, twice the epochs, always busy", saving=0.5, epochs_part=-1.0, is_always_busy=True),
    World("30%, thrice the epochs, always busy", saving=0.3, epochs_part=-3.0, is_always_busy=True),
)


@dataclass(frozen=True, slots=True)
class Played:
    """The verdicts that a reader of one job saw.

    Attributes:
        words: The verdict's word after each run.
        covers_now: After each run, whether the interval of one run's saving contained the true saving.
        covers_so_far: After each run, whether the interval of the saving of all runs contained the true saving.
        wrongly_paid_back: Whether any verdict said that savings had paid for the exploration when they had not.
        control_costs: After each run, extra cost of control runs as a share of the job's total cost.
    """

    words: tuple[SavingsWord, ...]
    covers_now: tuple[bool, ...]
    covers_so_far: tuple[bool, ...]
    wrongly_paid_back: bool
    control_costs: tuple[float, ...]


def play(world: World, budget: float, seed: int) -> Played:
    """Play one job of 100 runs with this budget of control runs."""
    rng, choices = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    epochs, costs, relative, busy = world.costs(rng)
    job = CreatedJob(
        job_id="simulated", job_id_prefix="simulated", batch_sizes=tuple(range(1, _SIZES + 1)), default_batch_size=1,
        policy=GP_VOI, mab_seed=seed, controls=budget, max_power=1, number_of_gpus=1, gpu_model="simulated",
    )  # fmt: skip
    best, least = _DEFAULT, math.inf
    evidence = Evidence(_DEFAULT, budget)
    seen: list[tuple[Verdict, bool, bool]] = []
    control_costs: list[float] = []
    wrongly_paid_back = False
    paid = wasted = at_default = extra = 0.0
    for number in range(RUNS):
        size, is_exploration, is_control = best, number < _SIZES, False
        if is_exploration:
            size = number
            if costs[number, size] > _STOP_AT * least:
                wasted, size = wasted + _STOP_AT * least / 2, best
        elif choices.random() < _WANDER:
            size, is_exploration = int(choices.choice([s for s in range(1, _SIZES) if s != best])), True
        elif best != _DEFAULT and is_control_due(job, evidence.judge(best), number):
            size, is_control = _DEFAULT, True
        cost = float(costs[number, size])
        evidence.add([Run(size, float(epochs[number, size]), cost, is_exploration, bool(busy[number]), is_control)])
        if number < _SIZES and cost < least:
            best, least = size, cost
        if number == _SIZES - 1 and world.saving > 0:
            best = int(np.argmin(relative))
        paid += cost
        at_default += cost / relative[size]
        extra += cost * (1 - relative[best]) if is_control else 0.0
        verdict = evidence.judge(best).verdict(wasted)
        now = _covers(verdict.now, 1 - relative[best])
        so_far = 1 - (paid + wasted) / at_default
        wrongly_paid_back |= verdict.is_paid_back and so_far <= 0
        seen.append((verdict, now, _covers(verdict.so_far, so_far)))
        control_costs.append(extra / (paid + wasted))
    words = tuple(verdict.word for verdict, _, _ in seen)
    return Played(
        words,
        tuple(now for _, now, _ in seen),
        tuple(so_far for *_, so_far in seen),
        wrongly_paid_back,
        tuple(control_costs),
    )


def _covers(share: Share | None, truth: float) -> bool:
    """Return whether the interval contains the truth; a missing interval or lower end cannot be wrong."""
    return share is None or ((share.low is None or share.low <= truth) and truth <= share.high)


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of jobs of one kind for which each statement was true.

    Attributes:
        world: Name of the kind of jobs.
        saving: True share of the cost that a run at the best size saves.
        wrong_ever: A wrong verdict was shown after any run.
        wrongly_paid_back: Any verdict said that savings had paid for the exploration when they had not.
        wrong_at: A wrong verdict was shown at the look; one share for each of `LOOKS`.
        right_by: The right verdict was shown at or before the look; one share for each of `LOOKS`.
        covered_now: The interval of one run's saving contained the true saving at each of `LOOKS`.
        covered_so_far: The interval of the saving of all runs contained the true saving at each of `LOOKS`.
        control_cost: Extra cost of control runs, as a mean share of the total cost until each of `LOOKS`.
    """

    world: str
    saving: float
    wrong_ever: float
    wrongly_paid_back: float
    wrong_at: tuple[float, ...]
    right_by: tuple[float, ...]
    covered_now: tuple[float, ...]
    covered_so_far: tuple[float, ...]
    control_cost: tuple[float, ...]


def measure(world: World, played: Sequence[Played]) -> Figures:
    """Summarise the jobs of one kind."""
    right = SavingsWord.SAVES if world.saving > 0 else None
    is_wrong = np.array([[word not in (SavingsWord.NOT_SHOWN, right) for word in each.words] for each in played])
    is_right = np.array([[word is right for word in each.words] for each in played])
    now, so_far = np.array([each.covers_now for each in played]), np.array([each.covers_so_far for each in played])
    return Figures(
        world=world.name,
        saving=world.saving,
        wrong_ever=float(is_wrong.any(axis=1).mean()),
        wrongly_paid_back=float(np.mean([each.wrongly_paid_back for each in played])),
        wrong_at=tuple(float(is_wrong[:, look - 1].mean()) for look in LOOKS),
        right_by=tuple(float(is_right[:, :look].any(axis=1).mean()) for look in LOOKS),
        covered_now=tuple(float(now[:, look - 1].mean()) for look in LOOKS),
        covered_so_far=tuple(float(so_far[:, look - 1].mean()) for look in LOOKS),
        control_cost=tuple(float(np.mean([each.control_costs[look - 1] for each in played])) for look in LOOKS),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the kinds of jobs, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="jobs of each kind (default: 200)")
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="print the verdicts and the cost of control runs with each of these budgets",
    )
    parser.add_argument("--only", nargs="+", metavar="KIND", help="play these kinds of jobs, named as in the table")
    options = parser.parse_args(arguments)
    figures, chosen = [], options.only or (FRONTIER if options.budgets else [])
    with ProcessPoolExecutor() as pool:
        for budget in options.budgets or [CONTROLS]:
            for world in (*EQUAL, *SAVING):
                if chosen and world.name not in chosen:
                    continue
                jobs = list(pool.map(partial(play, world, budget), range(options.seeds), chunksize=5))
                name = f"{budget:.1%}: {world.name}" if options.budgets else world.name
                figures.append(replace(measure(world, jobs), world=name))
    print(f"{options.seeds} jobs of {RUNS} runs of each kind; shares of jobs at looks {', '.join(map(str, LOOKS))}\n")
    print(text_table(_lines(figures)))
    return 0


def _lines(figures: Sequence[Figures]) -> list[list[str]]:
    head = [
        "jobs",
        "wrong at any look",
        "paid back wrongly",
        "wrong at",
        "right by",
        "run covered",
        "all covered",
        "control runs cost",
    ]
    rows = [
        [
            ("equal: " if not each.saving else "saving ") + each.world,
            f"{each.wrong_ever:.1%}",
            f"{each.wrongly_paid_back:.1%}",
            _percents(each.wrong_at),
            _percents(each.right_by) if each.saving else "-",
            _percents(each.covered_now),
            _percents(each.covered_so_far),
            " / ".join(f"{100 * share:.1f}" for share in each.control_cost) + " %",
        ]
        for each in figures
    ]
    return [head, *rows]


def _percents(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares)


if __name__ == "__main__":
    raise SystemExit(main())
