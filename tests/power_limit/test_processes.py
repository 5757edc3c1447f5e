"""Trainings of both frameworks on two real processes: one sets the machine's limits, both know the choice.

Both callbacks are used, so that a second training gets the measured limits from the server.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import Powered
from tests.support.job_bench import NEVER
from tests.support.power_limit_bench import BEST_W, FOUND_W, is_as_the_table
from tests.support.process_end import leave
from tests.support.ranks import stories_of
from tests.support.servers import ServerProcess
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client.http import BsoClient
from zeus_plugins.power_limit import PowerLimitProfile

PER_EPOCH = 6
# Two limits of three steps in each epoch; then the chosen one.
LIMITS_OF_STEPS = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3 + [BEST_W] * PER_EPOCH


def run(framework: str, folder: Path, server_url: str) -> list[dict[str, Any]]:
    """Run both processes; return their observations."""
    if importlib.util.find_spec(framework) is None and not os.environ.get("CI"):
        pytest.skip(f"needs zeus-plugins[{framework}]")
    modules = LIGHTNING if framework == "lightning" else TRANSFORMERS
    return stories_of("tests.power_limit.test_processes", folder, framework, server_url, modules=modules)


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_limits_set_by_a_process_and_known_to_the_server_reach_both_processes(
    framework: str, tmp_path: Path, server: ServerProcess
) -> None:
    first, second = run(framework, tmp_path, server.url)
    assert first["limits_of_steps"] == LIMITS_OF_STEPS
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == BEST_W
    assert first["profile"] == second["profile"]
    assert is_as_the_table(PowerLimitProfile.model_validate(first["profile"]))
    assert first["profile"]["batch_size"] == BATCH_SIZE
    assert first["set_w"][-1] == FOUND_W
    assert second["set_w"] == []
    again, other = run(framework, tmp_path, server.url)
    assert again["limits_of_steps"] == [BEST_W] * EPOCHS * PER_EPOCH
    assert again["chosen_limit_w"] == other["chosen_limit_w"] == BEST_W
    assert again["profile"] == other["profile"] == first["profile"]
    with BsoClient(server.url) as client:
        trials = client.show_job("digits-limits").trials
    assert [(trial.power_limit_w, trial.power_limits) for trial in trials] == [(BEST_W, 4)] * 2


# The training: ``torchrun --nproc_per_node 2 -m tests.power_limit.test_processes FOLDER FRAMEWORK SERVER_URL``.

EPOCHS = 3  # of 6 batches for each process
BATCH_SIZE = 32


def train(framework: str, folder: Path, server_url: str) -> dict[str, Any]:
    """Train a job with a single size, although no training reaches its target.

    Returns:
        Observations of this process.
    """
    work, is_lightning = Powered(), framework == "lightning"
    module = import_module("tests.support.lightning_bench" if is_lightning else "tests.support.hf_bench")
    bench = module.Bench(argparse.Namespace(url=server_url), "digits-limits", folder)
    power = bench.PowerLimit(**work.options())
    sizes = {"batch_sizes": (BATCH_SIZE,), "default_batch_size": BATCH_SIZE}
    job = bench.job(NEVER, **sizes, max_epochs=EPOCHS, num_pruning_rounds=0)
    callback = bench.callback(job, energy_monitor=work.monitor, on_failure="stop")
    options = {"devices": 2, "strategy": "ddp"} if is_lightning else {}
    bench.training(power, callback, work=work, epochs=EPOCHS, **options).train()
    assert power.profile is not None
    return {
        "chosen_limit_w": power.chosen_limit_w,
        "profile": power.profile.model_dump(mode="json"),
        "set_w": work.device.set_w,
        "limits_of_steps": work.limits_of_steps,
    }


if __name__ == "__main__":
    seen = train(sys.argv[2], Path(sys.argv[1]), sys.argv[3])
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    leave()
