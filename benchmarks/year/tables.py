"""The tables of a fleet's year, by the names of their marks in documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.documents import markdown_table
from zeus_plugins.protocol import GP_VOI, ZEUS


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a simulation, as Markdown."""
    return {"fleet": _totals(results), "fleet-server": _server(results)}


def _totals(results: Mapping[str, Any]) -> str:
    default, policies = results["default"], results["policies"]
    lines = [["simulated", "energy, MWh", "saved", "time, h", "saved", "runs", "given up"]]
    runs = str(results["recurrences"])
    lines.append(["always the default", _mwh(default), "–", f"{default['time_h']:.0f}", "–", runs, "0"])
    for policy, found in policies.items():
        energy = [_mwh(found), _share(found["energy_share_saved"])]
        time = [f"{found['time_h']:.0f}", _share(found["time_share_saved"])]
        lines.append([f"`{policy}`", *energy, *time, str(found["runs"]), str(found["given_up"])])
    less = 1 - policies[GP_VOI]["energy_j"] / policies[ZEUS]["energy_j"]
    return f"{markdown_table(lines)}\n\n`{GP_VOI}` against `{ZEUS}`: {_share(less)} of the energy saved."


def _server(results: Mapping[str, Any]) -> str:
    server = results["server"]
    ends: Counter[str] = Counter()
    for found in results["policies"].values():
        ends.update(found["ends"])
    cpu = "unknown" if server["cpu_ms_per_request"] is None else f"{server['cpu_ms_per_request']:.2f} ms"
    growth = f"{server['database_bytes'] / 2**20:.1f} MiB, {server['bytes_per_trial']:.0f} bytes a trial"
    lines = [
        ["measured", ""],
        ["date", results["at"]],
        ["jobs, recurrences", f"{results['jobs']}, {results['recurrences']}, with each policy"],
        ["recurrences of a job in flight", str(results["in_flight"])],
        ["jobs whose data drift", str(results["drifting"])],
        ["runs that crashed", str(ends["crash"])],
        ["runs that were preempted and resumed", str(ends["preemption"])],
        ["runs that vanished without a word", str(ends["vanishing"])],
        ["requests", str(sum(server["requests"].values()))],
        ["of these repeated, as the database was busy", str(ends["asked again"])],
        ["requests, decisions per second", f"{server['requests_per_s']:.0f}, {server['decisions_per_s']:.0f}"],
        ["CPU time of the server per request", cpu],
        ["stuck jobs", str(server["stuck_jobs"])],
        ["growth of the database", growth],
    ]
    return markdown_table(lines)


def _mwh(found: Mapping[str, Any]) -> str:
    return f"{found['energy_kwh'] / 1000:.1f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %".replace("-", "−")
