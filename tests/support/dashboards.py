"""Databases for the dashboard, filled by jobs that the service ran under a separate clock."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from bso_server.service.commands import BatchSizeService, Commands
from bso_server.storage.store import Store
from tests.support.service import open_store, run_apart, trial_id
from zeus_plugins.protocol import (
    CONTROLS,
    CreatedJob,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialState,
)

SIZES = (32, 64, 128, 256, 512, 1024)
# A named year.
LONG_NAME = "resnet50-" + "with-everything-that-we-tried.v2:" * 6


class Life:
    """Jobs that run one after another and end now."""

    def __init__(self, store: Store, *, seed: int = 1, began: timedelta = timedelta(days=12)) -> None:
        self.now = datetime.now(UTC) - began
        self.service = BatchSizeService(store, Commands(clock=lambda: self.now))
        self.random = random.Random(seed)  # noqa: S311 - no secret

    async def register(self, job_id: str, **fields: object) -> CreatedJob:
        job = CreatedJob.model_validate(
            {
                "job_id_prefix": job_id.partition("-")[0],
                "job_id": job_id,
                "batch_sizes": SIZES,
                "default_batch_size": 64,
                "max_epochs": 60,
                "target_metric": 0.9,
                "max_power": 700.0,
                "number_of_gpus": 1,
                "gpu_model": "NVIDIA H200",
                "policy": "gp_voi",
                "controls": "off",
                **fields,
            }
        )
        await self.service.register(job)
        return job

    async def run(
        self,
        job: CreatedJob,
        *,
        epochs: int | None = None,
        reports_each: bool = True,
        energy_source: str = "nvml",
        waited_share: float | None = None,
        startup_s: float | None = None,
        power_limits: int | None = None,
        slower: float = 1.0,
    ) -> TrialDispatch:
        """Run the job to its end or for `epochs` epochs, each `slower` times as long; report each or only the last."""
        trial = await self.service.transact(self.service.commands.begin_trial, job.job_id, None)
        size = trial.batch_size
        # Epochs to the target grow with the size, while the duration of an epoch falls.
        needed = round((9 + size / 60 + 60 / size) * math.exp(self.random.gauss(0, 0.08)))
        epoch_s = slower * (38 + 2600 / size**0.75)
        power_w = 700 * (0.45 + 0.5 * size / (size + 150))
        for epoch in range(1 if reports_each else needed, 1000):
            self.now += timedelta(seconds=epoch_s)
            metric = 0.9 * (1 - math.exp(-3.2 * epoch / needed)) / (1 - math.exp(-3.2))
            result = TrainingResult(
                **trial_id(trial).model_dump(),
                time=epoch_s * epoch,
                energy=epoch_s * epoch * power_w * math.exp(self.random.gauss(0, 0.002)),
                metric=min(metric, 0.899) if epoch < needed else 0.9 + self.random.random() / 100,
                current_epoch=epoch,
                energy_source=energy_source,
                waited_share=waited_share,
                startup_s=startup_s,
                power_limit_w=None if power_limits is None else 400.0,
                power_limits=power_limits,
            )
            answer = await self.service.reports.record_report(result)
            if answer.stop_train or epoch == epochs:
                break
        return trial

    async def miss(self, job: CreatedJob) -> None:
        """A run that trains to its last epoch without the target."""
        trial = await self.service.transact(self.service.commands.begin_trial, job.job_id, None)
        size, best = trial.batch_size, 0.86 - 0.02 * abs(math.log2(trial.batch_size / 128)) + self.random.gauss(0, 0.01)
        for epoch in range(1, 1000):
            self.now += timedelta(seconds=38 + 2600 / size**0.75)
            result = TrainingResult(
                **trial_id(trial).model_dump(),
                time=(38 + 2600 / size**0.75) * epoch,
                energy=(38 + 2600 / size**0.75) * epoch * 500,
                metric=best * (1 - math.exp(-0.5 * epoch)),
                current_epoch=epoch,
                energy_source="nvml",
            )
            if (await self.service.reports.record_report(result)).stop_train:
                return

    async def fail(self, job: CreatedJob, state: TrialState = TrialState.FAILED) -> None:
        """End a run without the target."""
        trial = await self.service.transact(self.service.commands.begin_trial, job.job_id, None)
        self.now += timedelta(minutes=7)
        end = TrialEnd(**trial_id(trial).model_dump(), outcome=state)
        await self.service.transact(self.service.commands.end_trial, end)


Fill = Callable[[Life], Awaitable[None]]


def registering(*job_ids: str, **fields: object) -> Fill:
    """Register jobs without a run."""

    async def fill(life: Life) -> None:
        for job_id in job_ids:
            await life.register(job_id, **fields)

    return fill


async def fifteen(life: Life) -> None:
    job = await life.register("resnet50-cifar100")
    for _ in range(9):
        await life.run(job)
    await life.fail(job)
    for _ in range(4):
        await life.run(job)
    life.now = datetime.now(UTC) - timedelta(minutes=12)
    await life.run(job, epochs=5, power_limits=6)


async def of_zeus(life: Life) -> None:
    job = await life.register("bert-sst2", policy="zeus", mab_seed=3)
    for _ in range(18):
        await life.run(job)


async def only_failures(life: Life) -> None:
    job = await life.register("llama-sft")
    for state in (TrialState.INFEASIBLE, TrialState.FAILED, TrialState.FAILED, TrialState.SUSPENDED):
        await life.fail(job, state)


async def long_name(life: Life) -> None:
    job = await life.register(LONG_NAME[:200], gpu_model="<script>alert(1)</script> & “GPU”")
    for _ in range(5):
        await life.run(job)


async def settled(life: Life) -> None:
    """A job of forty runs with control runs, which is shown to save and has paid that back."""
    job = await life.register("vit-imagenet", controls=0.3, mab_seed=1)
    for _ in range(40):
        await life.run(job, reports_each=False)


async def everything(life: Life) -> None:
    for fill in (fifteen, of_zeus, only_failures, long_name, settled):
        life.now = datetime.now(UTC) - timedelta(days=2)
        await fill(life)


def filled(database_url: str, fill: Fill) -> None:
    """Fill a database."""

    async def run() -> None:
        async with open_store(database_url) as store:
            await fill(Life(store))

    run_apart(run)


async def never_reached(life: Life) -> None:
    """A job of runs that all end without the target."""
    job = await life.register("llama-sft-unreachable", max_epochs=12, fingerprint={"monitor": "val_acc"})
    for _ in range(9):
        await life.miss(job)


async def one_run(life: Life) -> None:
    job = await life.register("first-try")
    await life.run(job)


async def estimated(life: Life) -> None:
    """A job with energies of watts × time."""
    job = await life.register("laptop-mnist", max_power=65.0, gpu_model="CPU", controls=CONTROLS)
    for _ in range(16):
        await life.run(job, energy_source="estimate: 65 W stated")


async def pages(life: Life) -> None:
    """Jobs in all states that their pages treat differently."""
    for fill in (settled, never_reached, one_run, estimated, fifteen, of_zeus, only_failures):
        life.now = datetime.now(UTC) - timedelta(days=2)
        await fill(life)


async def fleet(life: Life) -> None:
    """Sixty jobs, some of which have problems."""
    began = datetime.now(UTC) - timedelta(hours=20)
    for number in range(60):
        life.now = began + timedelta(minutes=13 * number)
        kind = ("resnet50", "bert", "vit", "whisper", "llama")[number % 5]
        job = await life.register(f"{kind}-{number:02}", default_batch_size=SIZES[number % 4], max_epochs=40)
        for _ in range((number * 7) % 12):
            if number % 10 == 3:
                await life.miss(job)
            else:
                await life.run(job, reports_each=False)
        if number % 10 == 7:
            await life.fail(job)
        if number % 10 == 9:
            await life.run(job, epochs=3)
