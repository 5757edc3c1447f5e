"""FSDP with the Hugging Face Trainer, two processes on the CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_bench import TRAIN_IMAGES, USERS_SIZE
from tests.support.hf_sharded_training import RATE, WAYS
from tests.support.job_bench import NEXT_SIZE, SERVERS_SIZE, JobBench
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import TRANSFORMERS
from zeus_plugins.protocol import TrialState

pytestmark = pytest.mark.slow

SCALED = RATE * math.sqrt(NEXT_SIZE / SERVERS_SIZE)


@dataclass
class Ran:
    """The records of two processes that trained in several ways, each the second trial of a job."""

    server: ServerProcess
    folder: Path

    def seen(self, way: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{way} {rank}.json").read_text()) for rank in range(2)]

    def bench(self, way: str) -> JobBench:
        return JobBench(self.server, f"digits-{way.replace(' ', '-')}")


@pytest.fixture(scope="module", name="ran")
def train_in_all_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("ran")
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    ran = Ran(server, folder)
    for way in WAYS:
        job = ran.bench(way).job()
        (folder / "job.json").write_text(job.model_dump_json())
        ran.bench(way).complete_first_trial(job)
    ended = run_ranks(
        *("tests.support.hf_sharded_training", server.url, "digits", str(folder), *WAYS),
        modules=TRANSFORMERS,
        output=folder / "output",
    )
    assert not any(ended), (folder / "output").read_text()
    yield ran
    server.kill()


@pytest.mark.parametrize("way", WAYS)
def test_both_processes_train_at_size_of_server(ran: Ran, way: str) -> None:
    accumulation = WAYS[way][0].get("gradient_accumulation_steps", 1)
    scales = "lr_scaling" in WAYS[way][1]
    for seen in ran.seen(way):
        assert set(seen["sizes"]) == {NEXT_SIZE // 2 // accumulation}
        assert seen["steps"] == TRAIN_IMAGES // NEXT_SIZE
        assert seen["is_sharded"]
        assert seen["rates"]
        assert seen["rates"] == pytest.approx([SCALED if scales else RATE] * len(seen["rates"]))
        assert (seen["size_afterwards"], seen["rate_afterwards"]) == (USERS_SIZE, RATE)
    trial = ran.bench(way).view().trials[1]
    assert (trial.state, trial.batch_size) == (TrialState.COMPLETED, NEXT_SIZE)
