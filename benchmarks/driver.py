"""Several clients of one server at once, and the figures of what they did."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.errors import BenchmarkError
from benchmarks.player import Exchange, Player
from benchmarks.processes import Target

BLOCK_LIMIT_S = 120.0
# With what has not changed since it was asked for.
SUCCESS = (*range(200, 300), 304)
# uvicorn closes a connection after 5 idle seconds; a request that leaves at that moment is lost.
IDLE_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Block:
    """The exchanges of all clients while each played one script.

    Attributes:
        exchanges: Per client, in the order of its script.
        wall_s: Seconds from the first request to the last answer.
        server_cpu_s: CPU seconds that the server used, or None.
        generator_cpu_s: CPU seconds that this process used.
    """

    exchanges: list[list[Exchange]]
    wall_s: float
    server_cpu_s: float | None
    generator_cpu_s: float

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(map(len, self.exchanges))

    @property
    def server_cpu_ms(self) -> float | None:
        """CPU milliseconds that the server used per request, or None."""
        return None if self.server_cpu_s is None else 1e3 * self.server_cpu_s / self.requests


class Driver:
    """Clients of one server.

    Args:
        target: The server.
        players: The connections.
    """

    def __init__(self, target: Target, players: Sequence[Player]) -> None:
        self.target = target
        self.clients = len(players)
        self._players = list(players)

    async def send(self, scripts: Sequence[Sequence[bytes]]) -> Block:
        """Let each client play one of the scripts, all at the same time.

        Args:
            scripts: At most one per client.

        Raises:
            BenchmarkError: An answer is not 2xx, or does not come.
        """
        players = [await self._fresh(client) for client in range(len(scripts))]
        meter = self.target.meter
        cpu, own, start = meter.cpu_s(), time.process_time(), time.perf_counter()
        try:
            async with asyncio.timeout(BLOCK_LIMIT_S):
                exchanges = await asyncio.gather(
                    *(player.play(script) for player, script in zip(players, scripts, strict=True))
                )
        except TimeoutError:
            raise BenchmarkError(
                f"{self.target.name}: {sum(map(len, scripts))} requests took longer than {BLOCK_LIMIT_S:g} s"
            ) from None
        wall_s, own_s, cpu_after = time.perf_counter() - start, time.process_time() - own, meter.cpu_s()
        self._check(scripts, exchanges)
        return Block(exchanges, wall_s, None if cpu is None or cpu_after is None else cpu_after - cpu, own_s)

    def close(self) -> None:
        """Close the connections."""
        for player in self._players:
            player.close()

    async def _fresh(self, client: int) -> Player:
        """The client's connection, or a new one where the server may be about to close it."""
        if self._players[client].idle_s > IDLE_LIMIT_S:
            self._players[client].close()
            self._players[client] = await Player.connect(self.target.host, self.target.port)
        return self._players[client]

    def _check(self, scripts: Sequence[Sequence[bytes]], exchanges: list[list[Exchange]]) -> None:
        for script, played in zip(scripts, exchanges, strict=True):
            for request, exchange in zip(script, played, strict=True):
                if exchange.status not in SUCCESS:
                    line = request.split(b"\r\n", 1)[0].decode()
                    body = exchange.body[:500].decode(errors="replace")
                    raise BenchmarkError(f"{self.target.name} answered {exchange.status} to {line}: {body}")


@asynccontextmanager
async def driving(target: Target, clients: int) -> AsyncIterator[Driver]:
    """A driver whose connections are open within the block."""
    driver = Driver(target, [await Player.connect(target.host, target.port) for _ in range(clients)])
    try:
        yield driver
    finally:
        driver.close()


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """Figures of one kind of request.

    Attributes:
        route: What was asked.
        requests: How often.
        answers: Number of answers per HTTP status.
        requests_per_s: Throughput with all clients.
        server_cpu_ms: CPU time of the server per request, over all its threads and processes, or None.
        least_cpu_ms: The same in the round that took the least: what else the machine does can only add to it.
        generator_cpu_ms: CPU time of the load generator per request.
        p50_ms: Median latency.
        p95_ms: Latency that 95 % of the requests kept.
        p99_ms: Latency that 99 % of the requests kept.
    """

    route: str
    requests: int
    answers: dict[str, int]
    requests_per_s: float
    server_cpu_ms: float | None
    least_cpu_ms: float | None
    generator_cpu_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(slots=True)
class Tally:
    """Blocks of one kind of request, added up."""

    blocks: list[Block] = field(default_factory=list)

    def figures(self, route: str) -> RouteFigures:
        """The figures over all blocks."""
        exchanges = [exchange for block in self.blocks for played in block.exchanges for exchange in played]
        latencies_ms = sorted(1e3 * exchange.latency_s for exchange in exchanges)
        requests = len(exchanges)
        least_ms = [block.server_cpu_ms for block in self.blocks if block.server_cpu_ms is not None]
        server_s = [block.server_cpu_s for block in self.blocks if block.server_cpu_s is not None]
        return RouteFigures(
            route=route,
            requests=requests,
            answers={str(status): n for status, n in sorted(Counter(e.status for e in exchanges).items())},
            requests_per_s=requests / sum(block.wall_s for block in self.blocks),
            server_cpu_ms=1e3 * sum(server_s) / requests if len(server_s) == len(self.blocks) else None,
            least_cpu_ms=min(least_ms, default=None),
            generator_cpu_ms=1e3 * sum(block.generator_cpu_s for block in self.blocks) / requests,
            p50_ms=percentile(latencies_ms, 0.50),
            p95_ms=percentile(latencies_ms, 0.95),
            p99_ms=percentile(latencies_ms, 0.99),
        )


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (nearest rank)."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
