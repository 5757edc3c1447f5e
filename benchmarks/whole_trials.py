"""Whole trials on several servers: the cost of a request for each server, compared within one run.

Each client runs trials one after another, like a training: it registers its job, gets a batch size, and reports each
epoch until the target is reached. Unlike a training, it sends its next request as soon as it has an answer. In each
round, the servers get the load one after another, so that changes in the machine's speed affect all servers equally.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import workload
from benchmarks.driver import SUCCESS, Connection, Exchange, RequestFigures, Tally
from benchmarks.processes import ROOT, BenchmarkError, Target, serving, serving_bso
from benchmarks.workload import EPOCH_REPORT, FINAL_REPORT, REGISTER, SUGGEST, Job
from tests.zeus_peer.peer import PeerMissingError, install

OURS, ZEUS = "bso-server", "Zeus 0.16"

_ROUND_LIMIT_S = 120.0
_ZEUS_SERVER = "zeus.optimizer.batch_size.server.router:app"


@dataclass(frozen=True, slots=True)
class Shape:
    """The extent of the load.

    Attributes:
        jobs: Number of jobs.
        in_flight: Number of concurrent trials per job; each trial has its own connection.
        trials: Number of trials per job.
        epochs: Reports per trial.
    """

    jobs: int
    in_flight: int
    trials: int
    epochs: int


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """Figures of one server.

    Attributes:
        server: Name of the server.
        requests: Number of requests.
        requests_per_s: Requests per second of all clients together.
        cpu_ms: CPU time of the server per request over all its threads and processes, or None if it is unknown.
        rss_mib: Resident memory of the server afterwards, or None if it is unknown.
        kinds: Figures per kind of request.
    """

    server: str
    requests: int
    requests_per_s: float
    cpu_ms: float | None
    rss_mib: float | None
    kinds: tuple[RequestFigures, ...]


class _Load:
    """The clients of one server, and the cost of their requests for the server so far."""

    def __init__(self, target: Target, shape: Shape, prefix: str) -> None:
        self._target, self._epochs = target, shape.epochs
        jobs = [Job(f"{prefix}-{number}", max_epochs=shape.epochs) for number in range(shape.jobs)]
        self._job_of_client = [job for job in jobs for _ in range(shape.in_flight)]
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._wall_s = 0.0
        self._cpu_s: float | None = 0.0

    async def play_round(self) -> None:
        """Let each client run one trial.

        Raises:
            BenchmarkError: The server did not answer as planned.
        """
        cpu_s, start = self._target.meter.cpu_s(), time.perf_counter()
        try:
            async with asyncio.timeout(_ROUND_LIMIT_S):
                await asyncio.gather(*(self._run_trial(job) for job in self._job_of_client))
        except TimeoutError:
            raise BenchmarkError(f"{self._target.name}: a round took longer than {_ROUND_LIMIT_S:g} s") from None
        self._wall_s += time.perf_counter() - start
        used_s = self._target.meter.cpu_s()
        if self._cpu_s is not None:
            self._cpu_s = None if used_s is None or cpu_s is None else self._cpu_s + used_s - cpu_s

    async def _run_trial(self, job: Job) -> None:
        epochs = self._epochs
        connection = await Connection.open(self._target)
        try:
            _, begun = await self._play(connection, [REGISTER, SUGGEST], [job.registration, job.suggest])
            trial = workload.begun_trial(begun)
            reports = [workload.report(trial, epoch=epoch, epochs=epochs) for epoch in range(1, epochs + 1)]
            answers = await self._play(connection, [*[EPOCH_REPORT] * (epochs - 1), FINAL_REPORT], reports)
        finally:
            connection.close()
        for epoch, answer in enumerate(answers, start=1):
            told = json.loads(answer.body)
            # If one server stopped a trial early, its load would be smaller than the load of the other servers.
            if told["stop_train"] != (epoch == epochs) or told["converged"] != (epoch == epochs):
                raise BenchmarkError(f"{self._target.name} judged epoch {epoch} of {epochs} otherwise: {told}")

    async def _play(self, connection: Connection, kinds: Sequence[str], script: Sequence[bytes]) -> list[Exchange]:
        answers = await connection.play(script)
        for kind, answer in zip(kinds, answers, strict=True):
            if answer.status not in SUCCESS:
                body = answer.body[:500].decode(errors="replace")
                raise BenchmarkError(f"{self._target.name} answered {answer.status} to {kind}: {body}")
            self._tallies[kind].add(answer.status, answer.latency_s)
        return answers

    def figures(self) -> TrialFigures:
        """Return the figures of all rounds so far."""
        kinds = tuple(tally.figures(kind) for kind, tally in self._tallies.items())
        requests = sum(kind.due for kind in kinds)
        return TrialFigures(
            server=self._target.name,
            requests=requests,
            requests_per_s=requests / self._wall_s,
            cpu_ms=None if self._cpu_s is None else 1e3 * self._cpu_s / requests,
            rss_mib=self._target.meter.rss_mib(),
            kinds=kinds,
        )


async def play_trials(targets: Sequence[Target], shape: Shape, prefix: str) -> list[TrialFigures]:
    """Put the same load on several servers in turn, after a warm-up round on other jobs that is not counted.

    Args:
        targets: The servers.
        shape: The extent of the load.
        prefix: Prefix of the jobs' ids; no earlier run may have used it.

    Raises:
        BenchmarkError: A server did not answer as planned.
    """
    for target in targets:
        await _Load(target, shape, f"{prefix}-warm").play_round()
    loads = [_Load(target, shape, prefix) for target in targets]
    for _ in range(shape.trials // shape.in_flight):
        for load in loads:
            await load.play_round()
    return [load.figures() for load in loads]


def measure_trials(
    shape: Shape, directory: Path, prefix: str, *, beside: Sequence[str], with_zeus: bool
) -> list[TrialFigures]:
    """Start the servers and put the load on them: ours on SQLite, in threads and over aiosqlite, and the others.

    Args:
        shape: The extent of the load.
        directory: Folder for databases and logs.
        prefix: Prefix of the jobs' ids, as in `play_trials`.
        beside: URLs of further databases, each for another server of ours.
        with_zeus: Include Zeus 0.16's server; if it is missing, install it into ``.zeus-peer``.

    Raises:
        BenchmarkError: A server did not start or did not answer as planned, or Zeus cannot be installed.
    """
    servers: list[AbstractContextManager[Target]] = [
        serving_bso(OURS, f"sqlite:///{directory / 'threads.sqlite3'}", directory),
        serving_bso(f"{OURS}, aiosqlite", f"sqlite+aiosqlite:///{directory / 'aiosqlite.sqlite3'}", directory),
        *(serving_bso(f"{OURS}, {url.partition(':')[0]}", url, directory) for url in beside),
    ]
    if with_zeus:
        servers.append(_serving_zeus(directory))
    with ExitStack() as started:
        targets = [started.enter_context(server) for server in servers]
        return asyncio.run(play_trials(targets, shape, prefix))


@contextmanager
def _serving_zeus(directory: Path) -> Iterator[Target]:
    """Run Zeus 0.16's server on a SQLite file, in the virtual environment that the tests use for it."""
    try:
        python = str(install(ROOT / ".zeus-peer").python)
    except PeerMissingError as error:
        raise BenchmarkError(f"Zeus 0.16 cannot be installed ({error}): leave it out by --no-zeus") from error
    url = f"sqlite+aiosqlite:///{directory / 'zeus.sqlite3'}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ZEUS_", "PYTHONPATH"))}
    environ["ZEUS_BSO_DATABASE_URL"] = url
    make_tables = [python, str(ROOT / "tests" / "zeus_peer" / "make_tables.py"), url]
    made = subprocess.run(make_tables, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 - as above
    if made.returncode:
        raise BenchmarkError(f"the tables of Zeus's server could not be made: {made.stderr.strip()}")
    with serving(ZEUS, [python, "-m", "uvicorn", _ZEUS_SERVER], directory, environ) as target:
        yield target
