"""``zeus-plugins doctor``: what would stop a training, or make its figures worth less."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``zeus-plugins``."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its energy counters and its server",
        description="Looks at versions, GPUs, energy counters and their permissions, the server and what waits for it."
        " The exit status is 0, or 1 when something would stop a training or keep it from the server.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from zeus_plugins.doctor import Level, examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(f"{finding.level:<8} {finding.check:<12} {finding.text}", flush=True)
    is_usable = all(finding.level is not Level.PROBLEM for finding in findings)
    if options.json:
        print(json.dumps({"usable": is_usable, "findings": [asdict(finding) for finding in findings]}, indent=2))
    return 0 if is_usable else 1
