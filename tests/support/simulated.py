"""Handmade workloads and traces with countable costs, for the tests of simulated jobs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from bso_server.simulate.traces import PAPER_WORKLOADS
from bso_server.simulate.workload import Epoch, SizeTrace, Workload

# Two power limits; an epoch at the lower one takes longer and less energy.
EPOCHS = {100.0: Epoch(20, 1600), 200.0: Epoch(10, 1800)}
# At η = 0.5 and 200 W an epoch costs 0.5·1600 + 0.5·200·20 = 2800 J, or 0.5·1800 + 0.5·200·10 = 1900 J.
HALF = {100.0: Epoch(10, 800), 200.0: Epoch(5, 900)}
NEVER = (math.inf,)
WORKLOAD = Workload(
    "made up",
    (
        SizeTrace(8, (8.0,), EPOCHS),
        SizeTrace(16, (4.0,), EPOCHS),
        SizeTrace(32, (6.0,), HALF),
        SizeTrace(64, NEVER, HALF),
    ),
    default_batch_size=16,
    max_epochs=20,
    max_power_w=200.0,
)

TRAIN = """dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch
digits,mlp,16,adam,1e-2,1,0.9,4
digits,mlp,16,adam,1e-2,1,0.8,2
digits,mlp,16,adam,1e-2,2,0.9,5
digits,mlp,32,adam,1e-2,1,0.90,
digits,mlp,32,adam,1e-2,2,0.9,nan
digits,mlp,64,adam,1e-2,1,0.9,3
digits,mlp,16,sgd,1e-2,1,0.9,1
faces,mlp,16,adam,1e-2,1,0.9,1
"""
POWER = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
digits,mlp,16,adam,100,20,80
digits,mlp,16,adam,200,10,180
digits,mlp,32,adam,200,5,180
digits,mlp,128,adam,200,5,180
"""
DIGITS_ARGUMENTS = [
    *("--dataset", "digits", "--network", "mlp", "--optimizer", "adam"),
    *("--target-metric", "0.9", "--max-epochs", "20", "--default-batch-size", "24"),
]


def only(batch_size: int, **changes: object) -> Workload:
    """Return the workload with only this size."""
    sizes = tuple(size for size in WORKLOAD.sizes if size.batch_size == batch_size)
    return replace(WORKLOAD, sizes=sizes, default_batch_size=batch_size, **changes)


def trace_files(folder: Path) -> list[str]:
    """Write the traces to disk; return the arguments that name them."""
    train, power = folder / "train.csv", folder / "power.csv"
    train.write_text(TRAIN)
    power.write_text(POWER)
    return ["--train-trace", str(train), "--power-trace", str(power)]


def paper_traces(folder: Path) -> Path:
    """Write traces of the six workloads and both GPUs with two sizes each, and an MLPerf file of one benchmark."""
    train, power = [TRAIN.splitlines()[0]], [POWER.splitlines()[0]]
    for each in PAPER_WORKLOADS:
        for size, epochs in ((each.default_batch_size // 2, 2), (each.default_batch_size, 3)):
            workload = f"{each.dataset},{each.network},{size},{each.optimizer}"
            train.append(f"{workload},1e-2,1,{each.target_metric},{epochs}")
            power.append(f"{workload},200,10,180")
    (folder / "summary_train.csv").write_text("\n".join(train))
    for gpu in ("v100", "a40"):
        (folder / f"summary_power_{gpu}.csv").write_text("\n".join(power))
    benchmark = {"sizes": [64, 128, 256, 512], "reports_to_target": [[9, 9], [10, 11, 11], [12], [16, 20]]}
    (folder / "mlperf_convergence.json").write_text(json.dumps({"jobs": {"reader": benchmark}}))
    return folder


def without_padding(text: str) -> str:
    """Return the text with single spaces between words."""
    return " ".join(text.split())
