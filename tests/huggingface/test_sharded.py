"""DeepSpeed on the CPU and FSDP with the Hugging Face Trainer, two processes each.

DeepSpeed is compiled at installation and is part of no extra: ``pip install deepspeed`` enables these tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import TRAIN_IMAGES, USERS_SIZE
from tests.support.hf_sharded_training import RATE, WAYS
from tests.support.job_bench import NEXT_SIZE, SERVERS_SIZE, JobBench
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import TRANSFORMERS
from zeus_plugins.protocol import TrialState

pytestmark = pytest.mark.slow

REFUSED = {"contradiction", "own optimizer"}
SCALED = RATE * math.sqrt(NEXT_SIZE / SERVERS_SIZE)
# The number of batches accumulated for a step, where it is above 1.
ACCUMULATED = {"accumulation": 2, "small devices": 2, "fsdp accumulation": 2}


@dataclass
class Ran:
    """The records of two processes that trained in several ways, each the second trial of a job."""

    server: ServerProcess
    folder: Path

    def seen(self, way: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{way} {rank}.json").read_text()) for rank in range(2)]

    def bench(self, way: str) -> JobBench:
        return JobBench(self.server, f"digits-{way.replace(' ', '-')}")


@pytest.fixture(scope="module", name="runs")
def run_all_of_a_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Ran]]:
    folder = tmp_path_factory.mktemp("ran")
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    finished: dict[bool, Ran] = {}

    def run(is_deepspeed: bool) -> Ran:
        if is_deepspeed not in finished:
            ran = finished[is_deepspeed] = Ran(server, folder)
            ways = [way for way, (options, _) in WAYS.items() if ("deepspeed" in options) is is_deepspeed]
            for way in ways:
                job = ran.bench(way).job()
                (folder / "job.json").write_text(job.model_dump_json())
                ran.bench(way).complete_first_trial(job)
            ended = run_ranks(
                *("tests.support.hf_sharded_training", server.url, "digits", str(folder), *ways),
                modules=TRANSFORMERS,
                output=folder / "output",
                environ={"DS_ACCELERATOR": "cpu"},
            )
            assert not any(ended), (folder / "output").read_text()
        return finished[is_deepspeed]

    yield run
    server.kill()


def runs_of(runs: Callable[[bool], Ran], way: str) -> Ran:
    is_deepspeed = "deepspeed" in WAYS[way][0]
    if is_deepspeed:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
    return runs(is_deepspeed)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in REFUSED])
def test_both_processes_and_engine_train_at_size_of_server(runs: Callable[[bool], Ran], way: str) -> None:
    ran = runs_of(runs, way)
    accumulation = ACCUMULATED.get(way, 1)
    per_process = NEXT_SIZE // 2 // accumulation
    for seen in ran.seen(way):
        assert "error" not in seen, seen
        assert set(seen["sizes"]) == {per_process}
        assert seen["steps"] == TRAIN_IMAGES // NEXT_SIZE
        assert seen["is_sharded"] is ("fsdp" in WAYS[way][0])
        if "deepspeed" in WAYS[way][0]:
            assert seen["engine"] == [per_process, accumulation, NEXT_SIZE]
            assert seen["configured"] == 2 * USERS_SIZE * WAYS[way][0].get("gradient_accumulation_steps", 1)
        scales = WAYS[way][1].get("lr_scaling") is not None
        assert seen["rates"]
        assert seen["rates"] == pytest.approx([SCALED if scales else RATE] * len(seen["rates"]))
        assert (seen["size_afterwards"], seen["rate_afterwards"]) == (USERS_SIZE, RATE)
    trial = ran.bench(way).view().trials[1]
    assert (trial.state, trial.batch_size) == (TrialState.COMPLETED, NEXT_SIZE)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("contradiction", "train_micro_batch_size_per_gpu=8 vs hf per_device_train_batch_size=16"),
        ("own optimizer", "OwnOptimizerTrainer.create_optimizer need not read: leave lr_scaling out"),
    ],
)
def test_settings_unable_to_follow_trial_are_refused_before_trial(
    runs: Callable[[bool], Ran], way: str, message: str
) -> None:
    ran = runs_of(runs, way)
    assert all(message in seen["error"] for seen in ran.seen(way)), ran.seen(way)
    assert len(ran.bench(way).view().trials) == 1
