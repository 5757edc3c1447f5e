"""Jobs with scripts in real processes, for the master's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.master_training import MAX_POWER_W
from zeus_plugins.master import Job, Run, ZeusMaster
from zeus_plugins.protocol import GpuConfig

GPUS = GpuConfig(max_power=MAX_POWER_W, number_of_gpus=1, gpu_model="none")
SIZES = [32, 64, 128]
TRAINING = (
    "{python} -m tests.support.master_training --batch-size {batch_size} --lr {learning_rate} --seed {seed} "
    "--epochs {epochs} --target {target_metric}"
)


def job_of(command: str | Sequence[str] = TRAINING, **fields: Any) -> Job:
    return Job(
        **{
            "name": "tiny",
            "dataset": "digits",
            "network": "softmax",
            "optimizer": "sgd",
            "target_metric": 0.8,
            "max_epochs": 20,
            "default_bs": 64,
            "default_lr": 0.5,
            "command": command,
            "workdir": ROOT,
            **fields,
        }
    )


class Listed:
    """An optimizer that plays sizes in a given order, and records the calls."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes or (64,)
        self.predicted = 0
        self.seen: list[tuple[int, float, bool]] = []

    def register_job(self, job: Job, batch_sizes: list[int], **knobs: float | None) -> None:
        assert job.default_bs in batch_sizes
        assert knobs.keys() == {"eta_knob", "beta_knob"}

    def predict(self, job: Job) -> int:
        del job
        self.predicted += 1
        return self.sizes[min(self.predicted, len(self.sizes)) - 1]

    def observe_run(self, job: Job, run: Run) -> None:
        del job
        self.seen.append((run.bs, run.cost, run.reached))

    def interrupt(self) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {"predicted": self.predicted}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.predicted = state["predicted"]


def master_of(tmp_path: Path, optimizer: Any = None, **options: Any) -> ZeusMaster:
    return ZeusMaster(optimizer or Listed(), tmp_path / "logs", **{"gpus": GPUS, **options})


def python_job(program: str, **fields: Any) -> Job:
    """Return a job with this program as its script; the program must write a result itself."""
    program = program.replace("{", "{{").replace("}", "}}")
    return job_of(["{python}", "-c", program, "{batch_size}", "{learning_rate}", "{seed}"], **fields)


WRITES_A_RESULT = """
import json, os, sys
where = os.environ["ZEUS_LOG_DIR"] + "/" + os.environ["ZEUS_JOB_ID"] + "+bs" + sys.argv[1] + ".train.json"
result = {"energy": 30.0, "time": 0.5, "cost": 40.0, "num_epochs": 20, "reached": True, "end_epoch": 3}
"""


REACHES = WRITES_A_RESULT + "open(where, 'w').write(json.dumps(result))"
"""Ends once there is the file that GO names."""
