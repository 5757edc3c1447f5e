"""``zeus-plugins doctor``: find problems that would stop a training or make its figures less accurate."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from zeus_plugins.client import client_from_environment
from zeus_plugins.client.outbox import default_outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.energy import EnergyUnavailableError
from zeus_plugins.energy.auto import choose
from zeus_plugins.energy.monitor import BrokenDriverError, answer_or_none
from zeus_plugins.energy.nvml import open_gpus
from zeus_plugins.environment import STATE_DIRECTORY, VARIABLES
from zeus_plugins.errors import (
    ZeusBSOConfigError,
    ZeusBSOError,
    ZeusBSORuntimeError,
    ZeusBSOServerUnreachableError,
    ZeusBSOTokenError,
)
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitUnavailableError, find_devices
from zeus_plugins.power_limit.guard import holder, left_behind
from zeus_plugins.protocol import TrialId, package_version, printable

DISTRIBUTIONS = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "accelerate",
    "nvidia-ml-py",
    "zeus",
)

_REMOVED = {
    "--gpu-check": "run `python -m benchmarks.gpu_check` in a clone of the repository",
    "--reset-power-limits": "run the commands that `zeus-plugins doctor` names",
}

_TIMEOUT_S = 5.0

# A heartbeat of a trial that does not exist changes nothing, and no job is expected to have this id.
_NO_TRIAL = TrialId(job_id="zeus-plugins-doctor-asks", batch_size=1, trial_number=1)


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    """Stops a training, or keeps it from the server."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: the check in a word, the result in a sentence, and details for programs."""

    check: str
    level: Level
    text: str
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.level:<8} {self.check:<12} {self.text}"


def examine() -> Iterator[Finding]:
    """Run all checks."""
    yield _versions()
    yield _variables()
    yield from _nvidia_gpus()
    yield _monitor()
    yield _server()
    yield _outbox()


def _versions() -> Finding:
    versions = {"python": platform.python_version(), "zeus-plugins": package_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding("versions", Level.OK, ", ".join(f"{name} {version}" for name, version in versions.items()), versions)


def _variables() -> Finding:
    """List the environment variables of a training that are set; the details have all."""
    details: dict[str, Any] = {}
    for each in VARIABLES:
        value = each.shown()
        shown = each.default.replace("`", "") if value is None else value
        details[each.name] = {"is_set": value is not None, "value": shown, "unit": each.unit, "meaning": each.meaning}
    stated = ", ".join(f"{name}={each['value']}" for name, each in details.items() if each["is_set"])
    return Finding("environment", Level.OK, f"set: {stated or 'none'} (--json has all)", details)


def _nvidia_gpus() -> Iterator[Finding]:
    try:
        gpus = open_gpus()
    except EnergyUnavailableError as unavailable:
        level = Level.WARNING if isinstance(unavailable, BrokenDriverError) else Level.OK
        yield Finding("nvidia", level, f"no GPU: {unavailable.cause}")
        return
    except ZeusBSOConfigError as error:
        yield Finding("nvidia", Level.PROBLEM, str(error))
        return
    for gpu in gpus:
        energy_uj, power_w = answer_or_none(gpu.energy_uj), answer_or_none(gpu.power_w)
        answers = {"energy counter": energy_uj, "power reading": power_w}
        text = ", ".join(f"{'no ' if answer is None else ''}{what}" for what, answer in answers.items())
        text += "" if power_w is None else f" ({power_w:g} W now)"
        details = {
            "index": gpu.index,
            "name": gpu.name,
            "counter_j": None if energy_uj is None else energy_uj / 1e6,
            "power_w": power_w,
            "max_power_w": answer_or_none(partial(getattr, gpu, "max_power_w")),
        }
        yield Finding("nvidia", Level.OK, f"{gpu}: {text}", details)
    yield from _power_limits()


def _monitor() -> Finding:
    """Find the default monitor. A training on a CPU beside idle GPUs will get a CPU monitor instead."""
    try:
        choice = choose()
        details = {"source": choice.monitor.source, "causes": list(choice.causes), **choice.monitor.gpus().model_dump()}
    except ZeusBSOError as error:
        return Finding("energy", Level.PROBLEM, str(error))
    level, warning = (Level.OK, "") if choice.warning is None else (Level.WARNING, f". {choice.warning}")
    causes = "; ".join(cause for cause in choice.causes if cause not in warning)
    reasons = f" (not anything better, for: {causes})" if causes else ""
    return Finding("energy", level, f"{choice.monitor.source}{warning}{reasons}", details)


def _server() -> Finding:
    """Check that the server answers and lets this token run trials, by a heartbeat of a missing trial."""
    try:
        with client_from_environment(timeout_s=_TIMEOUT_S).with_retries(NO_RETRIES) as client:
            details = {"server_url": client.server_url}
            try:
                client.heartbeat(_NO_TRIAL, regular=False)
            except (ZeusBSOTokenError, ZeusBSOServerUnreachableError) as error:
                return Finding("server", Level.PROBLEM, str(error), details)
            except ZeusBSORuntimeError as error:
                if error.status != 404:
                    return Finding("server", Level.PROBLEM, str(error), details)
                answers = f"{client.server_url} answers"
                if _NO_TRIAL.job_id in str(error):
                    return Finding("server", Level.OK, f"{answers}, and lets this client run trials", details)
                text = f"{answers}, but not as this project's server: a Zeus 0.16 server does so, too ({error})"
                return Finding("server", Level.WARNING, text, details)
            return Finding("server", Level.OK, f"{client.server_url} answers; the token may run trials", details)
    except ZeusBSOConfigError as error:
        return Finding("server", Level.PROBLEM, str(error))


def _outbox() -> Finding:
    """Check the directory of results that wait for delivery, and count them."""
    outbox = default_outbox()
    waiting, refused = outbox.waiting(), outbox.refused()
    details = {
        "directory": str(outbox.directory),
        "waiting": [str(path) for path in waiting],
        "refused": [str(path) for path in refused],
    }
    there = next(folder for folder in (outbox.directory, *outbox.directory.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        lost = "results are lost when a training ends while the server is away"
        text = f"{outbox.directory} cannot be written, so {lost}: set {STATE_DIRECTORY}"
        return Finding("outbox", Level.WARNING, text, details)
    text = f"{outbox.directory}: {len(waiting)} waiting, {len(refused)} refused by a server"
    if waiting:
        text += "; `zeus-plugins sync` delivers what waits"
    return Finding("outbox", Level.WARNING if waiting or refused else Level.OK, text, details)


def _power_limits() -> Iterator[Finding]:
    try:
        devices = find_devices()
    except ZeusBSOConfigError as error:
        yield Finding("power limit", Level.PROBLEM, str(error))
        return
    for device in devices:
        try:
            yield _power_limit(device)
        except PowerLimitUnavailableError as error:
            yield Finding("power limit", Level.OK, str(error))


def _power_limit(device: PowerLimitDevice) -> Finding:
    live, left = holder(device), left_behind(device)
    limit_w, default_w = device.limit_w(), device.default_limit_w()
    details = {"limit_w": limit_w, "default_w": default_w}
    remedy = f"`nvidia-smi -i {device.uuid} -pl"
    level, text = Level.OK, f"{device}: {limit_w:g} W"
    if live is not None:
        text += f"; {live} when it ends"
    elif left is not None:
        level, text = Level.WARNING, f"{text}, left behind by a killed training: {remedy} {left.original_w:g}`"
    elif default_w is not None and limit_w < default_w:
        level, text = Level.WARNING, f"{text}, below the default: {remedy} {default_w:g}`"
    return Finding("power limit", level, text, details)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, its energy counters and its server",
        description="Checks versions, GPUs and their power limits, energy counters and their permissions, the server"
        " and the results that wait for it. Changes nothing. The exit status is 1 if a problem would stop a training or"
        " keep it from the server, otherwise 0.",
    )
    for removed in _REMOVED:
        parser.add_argument(removed, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    for removed, instead in _REMOVED.items():
        if getattr(options, removed.removeprefix("--").replace("-", "_")):
            raise ZeusBSOError(f"{removed} was removed: {instead}")
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(printable(str(finding)), flush=True)
    is_usable = all(finding.level is not Level.PROBLEM for finding in findings)
    if options.json:
        print(json.dumps({"usable": is_usable, "findings": [asdict(finding) for finding in findings]}, indent=2))
    return 0 if is_usable else 1
