"""The plain PyTorch loop's optimizer against a real server, recurrence after recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from tests.support.servers import ServerProcess
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import ZEUS, GpuConfig, TrialState

GPUS = GpuConfig(max_power=100, number_of_gpus=1, gpu_model="V100")
JOB = JobSpec(
    job_id_prefix="loop",
    job_id="loop",
    batch_sizes=(8, 16, 32, 64),
    default_batch_size=32,
    target_metric=0.9,
    max_epochs=4,
    num_pruning_rounds=1,
    mab_num_explorations=1,
    mab_seed=7,
    policy=ZEUS,
)
# What one epoch costs in joules and how many of them reach the target; 64 never does.
EPOCH_J = {8: 300.0, 16: 100.0, 32: 100.0, 64: 50.0}
EPOCHS = {8: 3, 16: 2, 32: 3, 64: 99}


def train(server: ServerProcess) -> int:
    """One launch of a training script; the batch size that it trained with."""

    def epochs() -> Iterator[Measurement]:
        epoch_j = EPOCH_J[optimizer.get_batch_size()]
        yield from repeat(Measurement(time_s=epoch_j / 100, energy_j=epoch_j, source="replay"))

    with BatchSizeOptimizer(ReplayMonitor(epochs(), GPUS), server.url, JOB) as optimizer:
        batch_size = optimizer.get_batch_size()
        optimizer.on_train_begin()
        epoch = 0
        while not optimizer.training_finished:
            epoch += 1
            optimizer.on_evaluate(0.95 if epoch >= EPOCHS[batch_size] else 0.5)
    return batch_size


def recur(server: ServerProcess) -> list[int]:
    """One recurrence: launches until one succeeds."""
    sizes: list[int] = []
    while True:
        try:
            return [*sizes, train(server)]
        except ZeusBSOTrainFailError:
            with BsoClient(server.url) as client:
                sizes.append(client.show_job("loop").trials[-1].batch_size)


def test_a_recurring_loop_settles_on_the_cheapest_size(server: ServerProcess) -> None:
    recurrences = [recur(server) for _ in range(8)]
    with BsoClient(server.url) as client:
        job = client.show_job("loop")

    # 32 costs 300 J, 16 200 J. 8 crosses twice that in its second epoch and is stopped, which ends the way down; 64
    # runs out of epochs at 200 J. Both are launched again within the recurrence. Equal costs leave no chance to 32.
    assert recurrences == [[32], [16], [8, 64, 16], [16], [16], [16], [16], [16]]
    assert [trial.state for trial in job.trials if trial.batch_size in (8, 64)] == [
        TrialState.EARLY_STOPPED,
        TrialState.EXHAUSTED,
    ]
    assert (job.min_cost_j, job.best_batch_size) == (200, 16)


def test_the_server_may_die_between_two_requests(server: ServerProcess) -> None:
    monitor = ReplayMonitor(repeat(Measurement(time_s=1, energy_j=100, source="replay")), GPUS)
    with BatchSizeOptimizer(monitor, server.url, JOB) as optimizer:
        assert optimizer.get_batch_size() == 32
        server.kill()
        server.start()
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.5)
        server.kill()
        optimizer.on_evaluate(0.6)
        server.start()
        optimizer.on_evaluate(0.95)
        assert optimizer.training_finished
    with BsoClient(server.url) as client:
        (trial,) = client.show_job("loop").trials

    assert (trial.state, trial.energy_j, trial.time_s, trial.epochs) == (TrialState.COMPLETED, 300, 3, 3)
