"""Lightning's strategies that spread a model over processes, or spawn them, as far as they run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from tests.support import ROOT
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48
from tests.support.lightning_bench import Bench, Classifier, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING
from zeus_plugins.protocol import TrialState


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data_parallel", "tensor_parallel", "sizes"),
    [(2, 1, [*EPOCH_OF_24[:-4], 12]), (1, 2, EPOCH_OF_48)],
    ids=["sharded", "tensor parallel"],
)
def test_model_spread_over_processes_trains_at_size_of_server(
    bench: Bench, tmp_path: Path, data_parallel: int, tensor_parallel: int, sizes: list[int]
) -> None:
    arguments = [bench.server.url, bench.job_id, str(tmp_path), str(data_parallel), str(tensor_parallel)]
    output = tmp_path / "output"
    ended = run_ranks("tests.support.lightning_sharded", *arguments, modules=LIGHTNING, output=output)
    assert ended == [0, 0], output.read_text()
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [sizes] * 2
    assert bench.only_trial().state is TrialState.COMPLETED


@pytest.mark.slow
def test_spawned_processes_share_trial(bench: Bench, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.lightning_spawned", bench.server.url, bench.job_id, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {"sizes": [24, 24, 24, 12], "steps": 4}
    assert bench.only_trial().state is TrialState.COMPLETED
    # The callback with the trial ended with its process.
    assert "spawned processes" in json.loads((tmp_path / "parent.json").read_text())


# A failure here means that the strategy now runs without a GPU, and that docs/matrix.md has a row to try.


def test_fsdp_needs_gpu() -> None:
    with pytest.raises(ValueError, match="requires a GPU"):
        quiet_trainer(strategy=FSDPStrategy())


def test_deepspeed_needs_gpu() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs"):
        quiet_trainer(strategy=DeepSpeedStrategy()).fit(Classifier())
