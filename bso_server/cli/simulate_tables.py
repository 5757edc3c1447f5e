"""Comparisons as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bso_server.cli.tables import table
from bso_server.simulate.results import Comparison, geometric_means
from bso_server.simulate.savings import Consumption, Savings


def ratios_text(comparisons: Sequence[Comparison]) -> str:
    """Ratios of total cost to the oracle's, by policy and number of recurrences."""
    results = [(each, policy, result) for each in comparisons for policy, result in each.results.items()]
    marks = [str(mark) for mark in results[0][2].ratio]
    rows = [
        [
            each.workload.name,
            policy,
            f"{each.eta:g}",
            *map(_ratio, [*result.ratio.values(), result.worst_seed_ratio]),
            str(result.unfinished),
            _percent(result.energy_reduction_last5),
        ]
        for each, policy, result in results
    ]
    if len(comparisons) > 1:
        rows += [
            ["geometric mean", policy, "", *map(_ratio, ratios.values()), "", "", ""]
            for policy, ratios in geometric_means(comparisons).items()
        ]
    header = ["WORKLOAD", "POLICY", "ETA", *marks, "WORST SEED", "UNFINISHED", "ENERGY SAVED"]
    return (
        "total cost over the oracle's, mean over the seeds, by number of recurrences\n\n"
        + table(header, rows)
        + "\n\nENERGY SAVED: last five recurrences against the default batch size at the maximum power limit"
    )


def savings_text(comparisons: Sequence[Comparison], price_per_kwh: float | None, recorded: Savings | None) -> str:
    """Energy, time and money of all recurrences, and each policy's savings; without a price, money is left out."""
    amounts = ["ENERGY J", "KWH", "HOURS"] + ["MONEY"] * (price_per_kwh is not None)
    saved = [*(f"SAVED {amount.removeprefix('ENERGY ')}" for amount in amounts), "SAVED ENERGY", "SAVED TIME"]
    rows = []
    for each in comparisons:
        name, eta, default = each.workload.name, f"{each.eta:g}", each.conditions.landscape.default.batch_size
        always = _amounts(each.default_consumption, price_per_kwh)
        rows.append([name, f"always {default}", eta, str(each.recurrences), *always, *[""] * len(saved)])
        rows += [[name, policy, eta, *_savings(each.savings(policy), price_per_kwh)] for policy in each.results]
    if recorded is not None:
        rows.append([comparisons[0].workload.name, "what it really did", "", *_savings(recorded, price_per_kwh)])
    unfinished = any(result.unfinished for each in comparisons for result in each.results.values())
    return (
        "what all recurrences took, mean over the seeds, and what that saves against always taking the default\n\n"
        + table(["WORKLOAD", "POLICY", "ETA", "RECURRENCES", *amounts, *saved], rows)
        + (
            "\n\nUNFINISHED recurrences pay for what they took and for a run at the default, by which they end"
            * unfinished
        )
    )


def _savings(savings: Savings, price_per_kwh: float | None) -> list[str]:
    return [
        str(savings.recurrences),
        *_amounts(savings.consumed, price_per_kwh),
        *_amounts(savings.saved, price_per_kwh),
        _percent(savings.energy_share_saved),
        _percent(savings.time_share_saved),
    ]


def _amounts(consumed: Consumption | None, price_per_kwh: float | None) -> list[str]:
    if consumed is None:
        return ["-"] * (3 if price_per_kwh is None else 4)
    money = [] if price_per_kwh is None else [consumed.money(price_per_kwh)]
    return [f"{amount:.4g}" for amount in (consumed.energy_j, consumed.energy_kwh, consumed.time_h, *money)]


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None or math.isinf(ratio) else f"{ratio:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
