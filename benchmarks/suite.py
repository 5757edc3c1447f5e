"""The whole run: which servers are started, and what is measured on them."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.growth import GrowthFigures, run_growth
from benchmarks.load import Contestant, EchoLoad, GpVoiLoad, LoadFigures, Shape, TrainingLoad, run_load
from benchmarks.overhead import FRAMEWORKS, OverheadFigures, OverheadPlan, Train, run_overhead
from benchmarks.pages import PageFigures, run_pages
from benchmarks.processes import Target, bso_server, serving
from benchmarks.starts import StartFigures, run_starts
from benchmarks.watching import WatchFigures, run_watching
from zeus_plugins.errors import ZeusBSOError

SERVER = "bso-server"
BARE = "bare route"
PEER = "peer"

# What the figures depend on; uvicorn takes uvloop and httptools where they are installed, in all servers alike.
PACKAGES = (
    *("zeus-plugins", "litestar", "sqlalchemy", "aiosqlite", "uvicorn", "uvloop", "httptools"),
    *("lightning", "transformers", "torch"),
)

LOAD_LIMIT_S = 40.0
ONE_CLIENT_LIMIT_S = 20.0
SUGGEST_EPOCHS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements to make.

    Attributes:
        shape: The load.
        growth_sizes: Numbers of trials of one job to measure at; empty: not at all.
        growth_blocks: Blocks of 10 requests per size.
        growth_limit_s: When to stop growing.
        overhead: How to measure what the callbacks cost a training; None: not at all.
        starts: How often servers are started.
        watched_blocks: Blocks of requests by which watching is measured.
        jobs: Jobs in the list that is looked at.
    """

    shape: Shape
    growth_sizes: tuple[int, ...]
    growth_blocks: int
    growth_limit_s: float
    overhead: OverheadPlan | None
    starts: int
    watched_blocks: int
    jobs: int


FULL = Plan(
    shape=Shape(jobs=4, concurrency=4, epochs=100, rounds=5),
    growth_sizes=(10, 100, 1000, 5000),
    growth_blocks=4,
    growth_limit_s=60.0,
    overhead=OverheadPlan(epochs=220, steps=400, limit_s=120.0),
    starts=5,
    watched_blocks=10,
    jobs=200,
)
QUICK = Plan(
    shape=Shape(jobs=2, concurrency=2, epochs=5, rounds=2),
    growth_sizes=(10, 40),
    growth_blocks=1,
    growth_limit_s=30.0,
    overhead=OverheadPlan(epochs=5, steps=10, limit_s=10.0),
    starts=1,
    watched_blocks=1,
    jobs=60,
)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case that was not run, and why."""

    skipped: str


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured.

    Attributes:
        started_at: When, UTC.
        machine: Where, and with which versions.
        database: Kind of the database.
        plan: What was asked.
        load: The server and the bare route under the whole load.
        one_client: The same with one client.
        gp_voi: The server with short trials of jobs of policy `gp_voi`, as many clients as under load.
        peer: Another server under the whole load and with one client.
        growth: Costs as one job grows.
        workers: One and two workers under the whole load.
        drivers: SQLite in threads and over aiosqlite under the whole load.
        databases: SQLite and the other databases that were named, under the whole load.
        starts: How long a server takes to start.
        watching: What watching costs a request.
        pages: The cost of looking at the dashboard.
        overhead: What the callback costs a training, per framework.
    """

    started_at: str
    machine: dict[str, str]
    database: str
    plan: Plan
    load: tuple[LoadFigures, ...]
    one_client: tuple[LoadFigures, ...]
    gp_voi: LoadFigures
    peer: tuple[LoadFigures, ...] | Skipped
    growth: GrowthFigures | Skipped
    workers: tuple[LoadFigures, ...] | Skipped
    drivers: tuple[LoadFigures, ...] | Skipped
    databases: tuple[LoadFigures, ...] | Skipped
    starts: StartFigures
    watching: WatchFigures
    pages: PageFigures
    overhead: dict[str, OverheadFigures | Skipped]

    def to_json(self) -> dict[str, object]:
        """The results as JSON can hold them."""
        return asdict(self)


def run(
    plan: Plan, *, database_url: str | None = None, peer: Target | None = None, beside: Sequence[str] = ()
) -> Results:
    """Start the servers, measure, and stop them.

    Args:
        plan: What to measure.
        database_url: SQLAlchemy URL of a database for the benchmark; a SQLite file in a temporary directory when None.
        peer: Another server of the wire contract, already running.
        beside: SQLAlchemy URLs of databases to measure beside SQLite.

    Raises:
        BenchmarkError: A server did not start, or did not do what was asked of it.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="bso-bench-") as temporary:
        directory = Path(temporary)
        url = database_url or f"sqlite:///{directory / 'bso.sqlite3'}"
        for each in (url, *beside):
            bso_server(each, directory, "db", "upgrade")
        starts = run_starts(directory, times=plan.starts)
        watching = run_watching(blocks=plan.watched_blocks)
        load, one_client, gp_voi, growth = _our_server(plan, url, directory)
        return Results(
            started_at=started_at,
            machine=_machine(),
            database=_backend(url),
            plan=plan,
            load=load,
            one_client=one_client,
            gp_voi=gp_voi,
            peer=_peer(plan.shape, peer),
            growth=growth,
            workers=_workers(plan.shape, next(filter(_takes_workers, (url, *beside)), url), directory),
            drivers=_drivers(plan.shape, url, directory),
            databases=_databases(plan.shape, beside, directory),
            starts=starts,
            watching=watching,
            pages=_pages(plan, directory),
            overhead=_overhead(plan.overhead, url, directory),
        )


def _our_server(
    plan: Plan, url: str, directory: Path
) -> tuple[tuple[LoadFigures, ...], tuple[LoadFigures, ...], LoadFigures, GrowthFigures | Skipped]:
    with (
        serving(SERVER, "bso_server", ("serve",), database_url=url, directory=directory) as server,
        serving(BARE, "benchmarks.bare", (), database_url=url, directory=directory) as bare,
    ):
        contestants = [Contestant(server, TrainingLoad), Contestant(bare, EchoLoad)]
        load = _load("under load", contestants, plan.shape, LOAD_LIMIT_S)
        one_client = _load("one client", contestants, _with_one_client(plan.shape), ONE_CLIENT_LIMIT_S)
        short = replace(plan.shape, epochs=min(plan.shape.epochs, SUGGEST_EPOCHS))
        (gp_voi,) = _load("policy gp_voi", [Contestant(server, GpVoiLoad)], short, LOAD_LIMIT_S)
        return load, one_client, gp_voi, _growth(plan, server)


def _load(what: str, contestants: Sequence[Contestant], shape: Shape, limit_s: float) -> tuple[LoadFigures, ...]:
    names = " and ".join(contestant.target.name for contestant in contestants)
    _say(f"{what}: {names}, {shape.clients} clients, at most {limit_s:g} s")
    return asyncio.run(run_load(contestants, shape, prefix=_new_prefix(), limit_s=limit_s))


def _with_one_client(shape: Shape) -> Shape:
    return Shape(jobs=1, concurrency=1, epochs=shape.epochs, rounds=shape.rounds)


def _growth(plan: Plan, server: Target) -> GrowthFigures | Skipped:
    if not plan.growth_sizes:
        return Skipped("not asked for")
    _say(f"growth to {plan.growth_sizes[-1]} trials of one job, at most about {plan.growth_limit_s:g} s")
    return asyncio.run(
        run_growth(
            server,
            plan.growth_sizes,
            blocks=plan.growth_blocks,
            prefix=_new_prefix(),
            limit_s=plan.growth_limit_s,
        )
    )


def _pages(plan: Plan, directory: Path) -> PageFigures:
    _say(f"pages: the list of {plan.jobs} jobs, and polls")
    return run_pages(directory, jobs=plan.jobs)


def _peer(shape: Shape, peer: Target | None) -> tuple[LoadFigures, ...] | Skipped:
    """A peer is somebody else's: what it cannot do must not cost us our own figures."""
    if peer is None:
        return Skipped("no --peer-url given")
    contestants = [Contestant(peer, TrainingLoad)]
    try:
        return (
            *_load("under load", contestants, shape, LOAD_LIMIT_S),
            *_load("one client", contestants, _with_one_client(shape), ONE_CLIENT_LIMIT_S),
        )
    except BenchmarkError as error:
        return Skipped(str(error))


def _workers(shape: Shape, url: str, directory: Path) -> tuple[LoadFigures, ...] | Skipped:
    if "--workers" not in bso_server(url, directory, "serve", "--help"):
        return Skipped("bso-server serve has no --workers")
    if not _takes_workers(url):
        return Skipped("SQLite has one writer at a time: name a PostgreSQL database by --beside or --database-url")
    with (
        serving("1 worker", "bso_server", ("serve", "--workers", "1"), database_url=url, directory=directory) as one,
        serving("2 workers", "bso_server", ("serve", "--workers", "2"), database_url=url, directory=directory) as two,
    ):
        return _load("workers", [Contestant(one, TrainingLoad), Contestant(two, TrainingLoad)], shape, LOAD_LIMIT_S)


def _drivers(shape: Shape, url: str, directory: Path) -> tuple[LoadFigures, ...] | Skipped:
    if _backend(url) != "sqlite":
        return Skipped("the database is no SQLite file")
    with ExitStack() as servers:
        contestants = []
        for name, driver in (("in threads", "sqlite"), ("aiosqlite", "sqlite+aiosqlite")):
            own = f"{driver}:///{directory / f'{driver}.sqlite3'}"
            bso_server(own, directory, "db", "upgrade")
            server = serving(name, "bso_server", ("serve",), database_url=own, directory=directory)
            contestants.append(Contestant(servers.enter_context(server), TrainingLoad))
        return _load("SQLite", contestants, shape, LOAD_LIMIT_S)


def _databases(shape: Shape, beside: Sequence[str], directory: Path) -> tuple[LoadFigures, ...] | Skipped:
    if not beside:
        return Skipped("no other database was named by --beside")
    with ExitStack() as servers:
        contestants = []
        own = f"sqlite:///{directory / 'beside.sqlite3'}"
        bso_server(own, directory, "db", "upgrade")
        for url in (own, *beside):
            server = serving(_backend(url), "bso_server", ("serve",), database_url=url, directory=directory)
            contestants.append(Contestant(servers.enter_context(server), TrainingLoad))
        return _load("databases", contestants, shape, LOAD_LIMIT_S)


def _overhead(plan: OverheadPlan | None, url: str, directory: Path) -> dict[str, OverheadFigures | Skipped]:
    if plan is None:
        return dict.fromkeys(FRAMEWORKS, Skipped("not asked for"))
    with serving(SERVER, "bso_server", ("serve",), database_url=url, directory=directory) as server:
        return {name: _overhead_of(name, train, server, plan, directory) for name, train in FRAMEWORKS.items()}


def _overhead_of(
    name: str, train: Train, server: Target, plan: OverheadPlan, directory: Path
) -> OverheadFigures | Skipped:
    _say(f"epochs with and without the callback: {name}, at most about {plan.limit_s:g} s")
    try:
        return run_overhead(train, server, plan, prefix=_new_prefix(), directory=directory)
    except ModuleNotFoundError as error:
        return Skipped(f"{error.name} is not installed")
    except ZeusBSOError as error:
        raise BenchmarkError(f"{name}: {error}") from error


def _backend(url: str) -> str:
    return url.split(":", 1)[0].split("+", 1)[0]


def _takes_workers(url: str) -> bool:
    return _backend(url) != "sqlite"


def _new_prefix() -> str:
    return f"bench-{secrets.token_hex(4)}"


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "CPUs": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)
