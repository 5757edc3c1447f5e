"""``zeus-plugins energy -- COMMAND …``: measure the time and energy of a command."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from zeus_plugins.errors import ZeusBSOError

# Exit statuses of `timeout` and `env`, which commands themselves seldom return.
_FAILED, _NOT_EXECUTABLE, _NOT_FOUND, _KILLED_BY = 125, 126, 127, 128

READ_INTERVAL_S = 1.0
"""Seconds between two readings of the meter, so that only the rest is estimated if a device is lost."""

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A terminal sends them to the command as well.
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)

_REMOVED = {
    "--monitor": "leave it out, and the machine's best monitor measures. CUDA_VISIBLE_DEVICES= selects the CPU, and"
    " Zeus reads AMD GPUs (python -m zeus.monitor energy)",
    "--power-w": "set ZEUS_ESTIMATED_POWER_W",
    "--scope": "the monitor's devices count; CUDA_VISIBLE_DEVICES= selects CPU and memory",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``energy``."""
    parser = commands.add_parser(
        "energy",
        help="run a command, and print its time and energy",
        description="Runs the command and prints its time and energy on standard error. It passes SIGTERM,"
        " SIGHUP, SIGUSR1 and SIGUSR2 on; Ctrl-C reaches the command directly. The"
        f" exit status is the command's, {_KILLED_BY} + n if signal n ended it, {_NOT_FOUND} or {_NOT_EXECUTABLE} if it"
        f" cannot be started, and {_FAILED} if its energy cannot be measured, or if a command that ends with 0 could be"
        " measured only in part; the rest is then estimated.",
    )
    for removed in _REMOVED:
        parser.add_argument(removed, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--output", type=Path, help="write to this file instead of standard error")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command to run")
    parser.set_defaults(run=_energy, parser=parser)


def _energy(options: argparse.Namespace) -> int:
    for removed, instead in _REMOVED.items():
        if getattr(options, removed.removeprefix("--").replace("-", "_")) is not None:
            options.parser.error(f"{removed} was removed: {instead}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.parser.error("which command? zeus-plugins energy -- COMMAND …")
    try:
        status, told = _measured(command, options)
    except ZeusBSOError as error:
        print(f"zeus-plugins energy: {error}", file=sys.stderr)
        return _FAILED
    except OSError as error:
        print(f"zeus-plugins energy: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    if options.output is None:
        print(told, file=sys.stderr)
        return status
    try:
        options.output.write_text(f"{told}\n", encoding="utf-8")
    except OSError as error:
        print(f"zeus-plugins energy: {options.output}: {error.strerror}\n{told}", file=sys.stderr)
    return status


def _measured(command: Sequence[str], options: argparse.Namespace) -> tuple[int, str]:
    """Run the command; return the exit status and the text of the measurement."""
    from zeus_plugins import energy
    from zeus_plugins.energy.counters import Sampler
    from zeus_plugins.energy.meter import EpochMeter

    monitor = energy.auto()
    gpus = monitor.gpus()
    meter = EpochMeter(monitor)
    meter.begin()
    reader = Sampler(meter.state, READ_INTERVAL_S)
    try:
        exit_status = _execute(command)
        reader.stop()
        metrics = meter.end_epoch()
    finally:
        reader.stop()
        meter.end()
    found = {name.removeprefix("zeus/").removeprefix("epoch_"): value for name, value in metrics.items()}
    time_s, energy_j = found.pop("time_s"), found.pop("energy_j")
    mean_power_w = energy_j / time_s if time_s > 0 else 0.0
    status = _FAILED if meter.is_failing and exit_status == 0 else exit_status
    if not options.json:
        told = f"{time_s:.4g} s, {energy_j:.4g} J, {mean_power_w:.4g} W on average"
        extras = "".join(f", {name} {value:.4g}" for name, value in found.items())
        return status, f"zeus-plugins energy: {told} ({meter.source}){extras}"
    return status, json.dumps(
        {
            "command": list(command),
            "exit_status": exit_status,
            "time_s": time_s,
            "energy_j": energy_j,
            "mean_power_w": mean_power_w,
            "energy_source": meter.source,
            **gpus.model_dump(),
            **found,
        }
    )


def _execute(command: Sequence[str]) -> int:
    """Run a command, forward signals to it, and return its exit status as a shell would."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            received.append(number)  # Forwarded as soon as the command has started.
        elif number in _FORWARDED:
            process.send_signal(number)

    with ExitStack() as restored:
        for handled in (*_FORWARDED, *_FROM_KEYBOARD):
            restored.callback(signal.signal, handled, signal.signal(handled, forward))
        process = subprocess.Popen(command)  # nosec B603  # noqa: S603 - the user's own command
        for number in received:
            process.send_signal(number)
        status = process.wait()
    return _KILLED_BY - status if status < 0 else status
