"""``python -m benchmarks.fleet_load``: the cost of a fleet of trainings for a server, held against limits (the gate).

Each training reports when an epoch is over and sends heartbeats in between. The load is open-loop: a request is sent
when it is due, even if earlier requests still wait for answers. Each request opens a new connection, because a real
training's connection is closed between two requests. Latencies are measured from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import driver, tables
from benchmarks.driver import (
    EPOCH_REPORT,
    FINAL_REPORT,
    HEARTBEAT,
    NO_ANSWER,
    REGISTER,
    SUCCESS,
    SUGGEST,
    Exchange,
    Job,
    RequestFigures,
    Tally,
)
from benchmarks.processes import BenchmarkError, Target, bso_server, serving_bso
from bso_server.core.job import LeasePolicy
from bso_server.storage.tables import metadata
from zeus_plugins.protocol import TrialId

FLEET_CORES = 0.40
FLEET_P99_MS = 50.0
"""Goals of the gate for the standard fleet: the server's cores, and the 99th percentile of a heartbeat's latency."""

# The figures depend on these packages.
_PACKAGES = ("zeus-plugins", "litestar", "sqlalchemy", "uvicorn")

# While the fleet starts, at most this many requests are under way: the next is sent as soon as an answer arrives.
_STARTING_AT_ONCE = 32
# Limit of requests that wait for an answer at the same time, so that a slow server does not run out of open files.
_MOST_UNDER_WAY = 4000

_SIZES = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The number of trainings, and their behaviour.

    Attributes:
        trainings: Number of trainings at the same time.
        per_job: Number of trainings per job.
        epochs: Epochs per training. The last epoch reaches the target; then the job's next recurrence begins at once.
        epoch_s: Seconds per epoch.
        heartbeat_s: Seconds between heartbeats; by default the interval that the server asks for.
    """

    trainings: int = 10_000
    per_job: int = 10
    epochs: int = 20
    epoch_s: float = 300.0
    heartbeat_s: float = LeasePolicy().heartbeat_interval_s


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The requests of a fleet, and their cost for the server.

    Attributes:
        window_s: Duration of the measurement in seconds.
        start_s: Seconds until all trainings of the fleet had begun.
        server_cores: CPU time of the server per second, in cores; None if it is unknown.
        generator_cores: CPU time of the load generator per second.
        rss_mib: Resident memory of the server afterwards, or None if it is unknown.
        kinds: Figures per kind of request.
        rows: Number of rows of each table afterwards.
        database_bytes: Growth of the database in bytes; None if it is unknown.
    """

    window_s: float
    start_s: float
    server_cores: float | None
    generator_cores: float
    rss_mib: float | None
    kinds: tuple[RequestFigures, ...]
    rows: dict[str, int] = field(default_factory=dict)
    database_bytes: int | None = None

    @property
    def requests_per_s(self) -> float:
        """Mean number of requests that were due per second."""
        return sum(kind.due for kind in self.kinds) / self.window_s

    @property
    def failures(self) -> int:
        """Number of requests without an answer, or with an answer that is no success."""
        return sum(kind.failures for kind in self.kinds)

    @property
    def heartbeat_p99_ms(self) -> float:
        """99th percentile of the latency of heartbeats."""
        return next((kind.p99_ms for kind in self.kinds if kind.request == HEARTBEAT), 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fleet; return 0 if the measurement succeeded, even if it misses the gate, and 1 if it failed."""
    options = _parser().parse_args(arguments)
    fleet = Fleet(options.trainings, options.per_job, options.epochs, options.epoch_s, options.heartbeat_s)
    try:
        with tempfile.TemporaryDirectory() as directory:
            figures = measure_fleet(
                fleet,
                Path(directory),
                seconds=options.seconds,
                database_url=options.database_url,
            )
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    print(f"{datetime.now(UTC).isoformat(timespec='seconds')}, {_machine()}\n{tables.fleet_text(figures)}")
    if fleet == Fleet():
        print(f"The gate\n{tables.text_table([['goal', '', 'measured', 'result'], *judge(figures)])}")
    if options.json is not None:
        document = {"fleet": asdict(fleet), "figures": asdict(figures)}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def judge(figures: FleetFigures) -> list[list[str]]:
    """Compare the figures of the standard fleet with the gate.

    Returns:
        A list for each goal: its name, its limit, the measured value, and ``met``, ``not met`` or ``not known``.
    """
    return [
        _at_most("cores", FLEET_CORES, figures.server_cores),
        _at_most("p99 of a heartbeat, ms", FLEET_P99_MS, figures.heartbeat_p99_ms),
        _at_most("requests without success", 0, figures.failures),
    ]


def _at_most(what: str, limit: float, measured: float | None) -> list[str]:
    if measured is None:
        return [what, f"≤ {limit:g}", "–", "not known"]
    return [what, f"≤ {limit:g}", f"{measured:.3g}", "met" if measured <= limit else "not met"]


def _machine() -> str:
    versions = (f"{name} {version(name)}" for name in _PACKAGES)
    python = f"Python {platform.python_version()}"
    return ", ".join([platform.system(), platform.machine(), f"{os.cpu_count()} CPUs", python, *versions])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet_load",
        description="Start `bso-server serve` and let a fleet of simulated trainings run against it at their natural "
        "pace: docs/scale.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fleet = Fleet()
    parser.add_argument("--trainings", type=int, default=fleet.trainings, help="trainings at the same time")
    parser.add_argument("--per-job", type=int, default=fleet.per_job, help="how many of them are of one job")
    parser.add_argument("--epochs", type=int, default=fleet.epochs, help="epochs of each training")
    parser.add_argument("--epoch-s", type=float, default=fleet.epoch_s, help="seconds of an epoch")
    parser.add_argument("--heartbeat-s", type=float, default=fleet.heartbeat_s, help="seconds between heartbeats")
    parser.add_argument("--seconds", type=float, default=60, help="seconds to measure")
    parser.add_argument("--database-url", help="URL of an empty database, in place of a temporary SQLite file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


def measure_fleet(fleet: Fleet, directory: Path, *, seconds: float, database_url: str | None = None) -> FleetFigures:
    """Start a server, let a fleet train on it, and measure the growth of the server's database.

    Args:
        fleet: The trainings.
        directory: Working directory of the server.
        seconds: Duration of the measurement.
        database_url: An empty database; None for a SQLite file in `directory`.

    Raises:
        BenchmarkError: The server did not start, or the fleet could not begin.
    """
    # Each waiting request needs a connection, and thus an open file, here and in the server, which inherits the limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    url = database_url or f"sqlite:///{directory / 'fleet.sqlite3'}"
    bso_server(url, directory, "db", "upgrade")
    _, empty_bytes = asyncio.run(_extent(url))
    with serving_bso(url, directory) as target:
        figures = asyncio.run(_play_fleet(target, fleet, seconds))
    rows, full_bytes = asyncio.run(_extent(url))
    grown = None if full_bytes is None or empty_bytes is None else full_bytes - empty_bytes
    return replace(figures, rows=rows, database_bytes=grown)


async def _extent(url: str) -> tuple[dict[str, int], int | None]:
    """Return the number of rows of each table, and the size of the database in bytes, or None if it is unknown."""
    parsed = make_url(url)
    asynchronous = parsed.set(drivername="sqlite+aiosqlite") if parsed.drivername == "sqlite" else parsed
    engine = create_async_engine(asynchronous)
    try:
        async with engine.connect() as connection:
            counts = {
                table.name: await connection.scalar(select(func.count()).select_from(table)) or 0
                for table in metadata.sorted_tables
            }
            query = _SIZES.get(parsed.get_backend_name())
            return counts, None if query is None else await connection.scalar(text(query))
    finally:
        await engine.dispose()


class _Clients:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._under_way = asyncio.Semaphore(_MOST_UNDER_WAY)
        self.tallies: dict[str, Tally] = defaultdict(Tally)

    async def ask(self, kind: str, request: bytes, *, due: float | None = None) -> Exchange | None:
        """Send a request that was due at the instant `due` and return the answer; None if no answer came."""
        # Requests that start the fleet have no due time, and are not counted.
        tally, due = (Tally(), time.monotonic()) if due is None else (self.tallies[kind], due)
        async with self._under_way:
            try:
                answer = await driver.exchange(self._target, request)
            except BenchmarkError:
                tally.answers[NO_ANSWER] += 1
                return None
        tally.add(answer.status, time.monotonic() - due)
        return answer


class _Training:
    """A training of the fleet: its trial, and its epochs so far."""

    def __init__(self, clients: _Clients, job: Job, fleet: Fleet, chance: random.Random) -> None:
        self._clients, self._job, self._fleet = clients, job, fleet
        self._epoch = chance.randrange(fleet.epochs)
        # Random offsets spread epochs and heartbeats evenly, as in a fleet that has been training for long.
        self._until_report_s = chance.uniform(0, fleet.epoch_s)
        self._until_beat_s = chance.uniform(0, fleet.heartbeat_s)
        self._trial: TrialId | None = None

    async def begin(self, *, due: float | None = None) -> None:
        """Register the job and get a trial."""
        await self._clients.ask(REGISTER, self._job.registration, due=due)
        answer = await self._clients.ask(SUGGEST, self._job.suggest, due=None if due is None else time.monotonic())
        if answer is not None and answer.status in SUCCESS:
            self._trial = driver.begun_trial(answer)
        elif due is None:
            raise BenchmarkError(f"no batch size while the fleet starts: {answer}")

    async def train(self, *, began: float, until: float) -> None:
        """Report and send heartbeats until the window is over."""
        report_at, beat_at = began + self._until_report_s, began + self._until_beat_s
        while (due := min(report_at, beat_at)) < until:
            await asyncio.sleep(due - time.monotonic())
            if self._trial is None:
                await self.begin(due=due)
            elif due == beat_at:
                await self._clients.ask(HEARTBEAT, driver.heartbeat(self._trial), due=due)
            else:
                await self._report(self._trial, due)
            report_at += self._fleet.epoch_s if due == report_at else 0
            beat_at += self._fleet.heartbeat_s if due == beat_at else 0

    async def _report(self, trial: TrialId, due: float) -> None:
        self._epoch += 1
        report = driver.report(trial, epoch=self._epoch, epochs=self._fleet.epochs)
        is_last = self._epoch == self._fleet.epochs
        answer = await self._clients.ask(FINAL_REPORT if is_last else EPOCH_REPORT, report, due=due)
        if is_last and answer is not None:
            self._epoch = 0
            await self.begin(due=time.monotonic())


async def _play_fleet(target: Target, fleet: Fleet, seconds: float) -> FleetFigures:
    """Start the fleet as fast as the server allows, then let it train; the figures do not cover the database."""
    clients, chance = _Clients(target), random.Random(0)  # noqa: S311 - spreads a load
    numbers = range(-(-fleet.trainings // fleet.per_job))
    jobs = [Job(f"fleet-{number}", max_epochs=fleet.epochs) for number in numbers]
    trainings = [_Training(clients, jobs[number // fleet.per_job], fleet, chance) for number in range(fleet.trainings)]
    start = time.monotonic()
    await _few_at_once(clients.ask(REGISTER, job.registration) for job in jobs)
    await _few_at_once(training.begin() for training in trainings)
    began = time.monotonic()
    print(f"{fleet.trainings} trainings of {len(jobs)} jobs have begun in {began - start:.0f} s", file=sys.stderr)

    server_cpu_s, own_cpu_s = target.meter.cpu_s(), time.process_time()
    await asyncio.gather(*(training.train(began=began, until=began + seconds) for training in trainings))
    took_s = time.monotonic() - began
    used_s = target.meter.cpu_s()
    return FleetFigures(
        window_s=took_s,
        start_s=began - start,
        server_cores=None if used_s is None or server_cpu_s is None else (used_s - server_cpu_s) / took_s,
        generator_cores=(time.process_time() - own_cpu_s) / took_s,
        rss_mib=target.meter.rss_mib(),
        kinds=tuple(tally.figures(kind) for kind, tally in clients.tallies.items()),
    )


async def _few_at_once(asked: Iterable[Awaitable[object]]) -> None:
    semaphore = asyncio.Semaphore(_STARTING_AT_ONCE)

    async def wait_for(one: Awaitable[object]) -> None:
        async with semaphore:
            await one

    await asyncio.gather(*map(wait_for, asked))


if __name__ == "__main__":
    sys.exit(main())
