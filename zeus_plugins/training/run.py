"""One trial of a training, from the question for a batch size to its end: what all frameworks decide alike.

A framework's callback makes a `TrialRun` for each training and calls it from its hooks. The run decides; what it wants
done to the trainer it asks of a `TrainerPort`, which each framework implements in a few lines. Below it, a
`TrialSession` measures and talks to the server, on rank 0 alone: the other ranks get its answers and its errors by
broadcast, so that all of them go on, stop or raise together.

The order of calls, on every rank::

    run = TrialRun(job, options)
    run.begin(port)  or  run.resume(port, saved)
    run.scale_learning_rate()        when optimizers and schedulers exist, and no checkpoint has restored them yet
    run.start()                      right before the first step
    run.check()                      before the first step of each epoch, when its loader exists
    run.report(metric, epochs)       after each evaluation
    run.report_last_epoch(epochs)    after the last epoch
    run.finish(error)                always; then, unless there is an error, run.raise_failure()

Before `begin`, after `finish`, and in a training that goes on from a checkpoint without a trial, each of them does
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOTrainFailError
from zeus_plugins.protocol import JobSpec, PowerLimitChoice, ReportResponse
from zeus_plugins.training.entry import OnUnreachable, check_on_unreachable
from zeus_plugins.training.loaders import BatchSplit, split_batch
from zeus_plugins.training.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.training.metrics import EpochCount
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.port import TrainerPort, cluster_monitor, decided_by_rank_zero, node_monitor
from zeus_plugins.training.session import TrialSession, end_trial_from_another_rank
from zeus_plugins.training.trial import TrialInfo

__all__ = [
    "TrialOptions",
    "TrialRun",
    "train_fail_error",
]

T = TypeVar("T")

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The arguments that the batch size callbacks of all frameworks share; they describe them.

    Raises:
        ZeusBSOConfigError: One of them cannot work.
    """

    server_url: str | None = None
    token: str | None = None
    lr_scaling: str = "none"
    energy_monitor: EnergyMonitor | WindowMonitor | None = None
    max_per_device_batch_size: int | None = None
    on_failure: Literal["raise", "stop"] = "raise"
    on_unreachable: OnUnreachable = "default"

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "stop"):
            raise ZeusBSOConfigError(f"on_failure is {self.on_failure!r}: choose 'raise' or 'stop'")
        if self.max_per_device_batch_size is not None and self.max_per_device_batch_size < 1:
            raise ZeusBSOConfigError(f"max_per_device_batch_size is {self.max_per_device_batch_size}: it is at least 1")
        check_on_unreachable(self.on_unreachable)
        lr_factor(self.lr_scaling, 1, 1)  # there is such a rule, or it raises


class TrialRun:
    """One training of the job, and its trial. Can be pickled before it begins.

    Args:
        job: The recurring job. Its batch sizes are global.
        options: As the user gave them.
        connect: Makes a client, from the options' `server_url` and `token`.

    Attributes:
        patches: Changes to the trainer, which `finish` undoes.
    """

    def __init__(
        self,
        job: JobSpec,
        options: TrialOptions,
        *,
        connect: Callable[[str | None, str | None], ServerPort] = client_from_environment,
    ) -> None:
        self._job = job
        self._options = options
        self._connect = connect
        self.patches = Patches()
        self._port: TrainerPort | None = None
        self._client: ServerPort | None = None
        self._session: TrialSession | None = None
        self._cluster: ClusterMonitor | None = None
        self._trial: TrialInfo | None = None
        self._takes_reports = False
        self._is_finished = False
        self._epochs = EpochCount()
        # The optimizers and schedulers whose rates were scaled, to be scaled back.
        self._scaled: list[tuple[Sequence[Any], Sequence[Any]]] = []

    @property
    def trial(self) -> TrialInfo | None:
        """The trial as of the latest report, the same on every rank; None without one."""
        return self._trial

    @property
    def is_active(self) -> bool:
        """Whether there is a trial, and its training goes on."""
        return self._port is not None and self._trial is not None

    @property
    def is_open(self) -> bool:
        """Whether there is a trial, its training goes on, and the server takes reports on it."""
        return self.is_active and self._takes_reports

    @property
    def is_reporting(self) -> bool:
        """Whether `report` would report: the trial is open, and no verdict has said stop."""
        return self.is_open and self._trial is not None and not self._trial.is_over

    def begin(self, port: TrainerPort) -> None:
        """Ask for a batch size, and have the trainer deliver it.

        Raises:
            ZeusBSOConfigError: The job, the trainer or the data cannot work; the server refuses the job or the token.
            ZeusBSORuntimeError: As of `TrialSession.ask`.
        """
        self._port = port
        self._splits(port, self._job.batch_sizes)  # before a trial is spent on a size that cannot be
        self._enter(port, self._ask)

    def resume(self, port: TrainerPort, saved: Callable[[], Mapping[str, Any] | None]) -> None:
        """Go on with the trial of a checkpoint, at its batch size; without one, leave the training alone.

        Args:
            port: The trainer.
            saved: Reads what `state` returned; None, or nothing in it, from a checkpoint without a trial. Called on
                rank 0.

        Raises:
            ZeusBSOConfigError: The trial's size cannot be had on these devices; the trial can still go on elsewhere.
            ZeusBSORuntimeError: As of `TrialSession.resume`.
        """
        self._port = port
        state = self._decided(port, lambda: self._resumable(port, saved()))
        if state is None:
            if port.rank == 0:
                _logger.warning(
                    "the checkpoint holds no trial, so this training goes on with its own batch size, and nothing of "
                    "it is measured or reported: the rest of a training says nothing about a whole one. Train from the "
                    "start to let the server choose"
                )
            return
        self._epochs = EpochCount(state.get("has_fractions"))
        self._enter(port, lambda session: session.resume(state["trial"]))

    def scale_learning_rate(self) -> None:
        """Scale the rates of all optimizers and schedulers as the options say."""
        if self._port is None or not self.is_active or self._lr_factor == 1.0:
            return
        optimizers, schedulers = self._port.optimizers()
        if self._port.keeps_optimizers:
            self._scaled.append((optimizers, schedulers))
        scale_learning_rate(optimizers, schedulers, self._lr_factor)

    def start(self) -> None:
        """Log the choice, and begin to measure."""
        if self._port is None or self._trial is None:
            return
        self._port.log(
            {
                "zeus/batch_size": float(self._trial.batch_size),
                "zeus/trial_number": float(self._trial.trial_number or 0),
                "zeus/lr_factor": self._lr_factor,
            }
        )
        self._synchronize()
        if self._session is not None and self.is_open:
            self._session.begin_measurement()

    def check(self) -> None:
        """Make sure that the batch size is in force: never train at another size than the one that is reported.

        Raises:
            ZeusBSOConfigError: It is not.
        """
        port, trial = self._port, self._trial
        if port is None or trial is None:
            return
        expected = trial.batch_size / (port.devices * port.accumulation)
        delivered = port.delivered()
        if set(delivered) != {expected}:
            sizes = ", ".join("?" if size is None else f"{size:g}" for size in delivered)
            raise ZeusBSOConfigError(
                f"the train loaders deliver [{sizes}] samples per batch instead of {expected:g} (batch size "
                f"{trial.batch_size} over {port.devices} devices × {port.accumulation} accumulated batches): something "
                "set another size after the callback had set it"
            )

    def report(self, metric: Callable[[], float | None], epochs: float) -> None:
        """Report an evaluation, and stop the trainer when the server says so. Nothing after that verdict.

        Args:
            metric: Finds the metric; None when there is nothing to report yet. Called on rank 0, and what it raises is
                raised on every rank.
            epochs: Epochs of this trial trained so far. Fractions are rounded up once whole epochs were reported.

        Raises:
            Exception: What `metric` raises.
        """
        port, trial = self._port, self._trial
        if port is None or trial is None or not self.is_reporting:
            return
        self._synchronize()
        self._trial = self._decided(port, lambda: self._reported(trial, metric(), epochs))
        if self._trial.is_over:
            port.stop()

    def report_last_epoch(self, epochs: float) -> None:
        """Report the end of a training whose last evaluation was before its last epoch.

        The server must hear that no more epochs are allowed; the latest metric stands.
        """
        trial = self._trial
        if trial is not None and trial.metric is not None and epochs >= self._job.max_epochs > (trial.epoch or 0):
            metric = trial.metric
            self.report(lambda: metric, epochs)

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the server keep what a power-limit callback found out; called on rank 0."""
        if self._session is not None:
            self._session.keep_power_limits(choice)

    def state(self) -> dict[str, Any]:
        """The trial for a checkpoint, in plain types; an empty dict without one.

        The open window counts: it is closed into the totals and the next one opened.
        """
        if self._session is not None and self._session.has_trial:
            self._session.state_dict()
            self._trial = self._session.trial
        if self._trial is None:
            return {}
        return {"trial": self._trial.model_dump(mode="json"), "has_fractions": self._epochs.has_fractions}

    def finish(self, error: BaseException | None = None) -> None:
        """Undo all changes, and end a trial that has no verdict. Nothing the second time.

        Meant for exit paths: it makes no collective call, and never raises, which would hide the `error` that ended the
        training.
        """
        if self._is_finished:
            return
        self._is_finished, self._port = True, None
        try:
            # The last first, and each though another fails.
            with ExitStack() as stack:
                if self._client is not None:
                    stack.callback(self._client.close)
                if self._cluster is not None:
                    stack.callback(self._cluster.close)
                stack.callback(self._end, error)
                stack.callback(self._scale_back)
                stack.callback(self.patches.undo)
        except Exception:
            _logger.exception("could not clean up after the training")

    def raise_failure(self) -> None:
        """Raise when the training is over and its trial failed, if that is wanted.

        Raises:
            ZeusBSOTrainFailError: The trial did not reach its target.
        """
        if self._trial is None or not self._takes_reports or self._options.on_failure != "raise":
            return
        verdict = self._trial.verdict
        if verdict is None or not (verdict.stop_train and verdict.converged):
            raise train_fail_error(verdict)

    def check_epochs(self, limit: float, setting: str, *, trained: int = 0) -> None:
        """Refuse a trainer that ends before the job's last epoch.

        Args:
            limit: Epochs after which the trainer ends.
            setting: What limits it, such as ``Trainer(max_epochs={})``.
            trained: Epochs that it had trained before the trial began.

        Raises:
            ZeusBSOConfigError: It ends before.
        """
        needed = self._job.max_epochs
        if limit - trained >= needed:
            return
        already = f" after the {trained} epochs that this trainer has trained already" if trained else ""
        remedy = (
            "make a new Trainer for each training"
            if trained
            else f"set JobSpec(max_epochs={int(limit)}) or {setting.format(needed)}"
        )
        raise ZeusBSOConfigError(
            f"{setting.format(f'{limit:g}')} ends before the job's max_epochs ({needed}){already}, so the server would "
            f"never learn that a batch size cannot reach the target: {remedy}"
        )

    @property
    def _lr_factor(self) -> float:
        """The factor on the rates that the user chose for the job's default size."""
        size = self._job.default_batch_size if self._trial is None else self._trial.batch_size
        return lr_factor(self._options.lr_scaling, size, self._job.default_batch_size)

    def _decided(self, port: TrainerPort, decide: Callable[[], T]) -> T:
        return decided_by_rank_zero(decide, rank=port.rank, world_size=port.world_size, broadcast=port.broadcast)

    def _enter(self, port: TrainerPort, begin: Callable[[TrialSession], bool]) -> None:
        """Have rank 0 get the trial, all ranks hear of it, and the trainer deliver its size."""
        self._cluster = cluster_monitor(port, self._options.energy_monitor)

        def entered() -> tuple[TrialInfo, bool]:
            self._client = self._connect(self._options.server_url, self._options.token)
            monitor = self._cluster or node_monitor(port, self._options.energy_monitor)
            self._session = TrialSession(self._job, self._client, monitor, on_unreachable=self._options.on_unreachable)
            takes_reports = begin(self._session)
            return self._session.trial, takes_reports

        self._trial, self._takes_reports = self._decided(port, entered)
        size = self._trial.batch_size
        port.deliver(self._splits(port, [size])[size], self.patches)

    def _ask(self, session: TrialSession) -> bool:
        batch_size = session.ask()
        if batch_size not in self._job.batch_sizes:
            raise ZeusBSOConfigError(
                f"the server chose batch size {batch_size}, which is not one of the job's: "
                f"{list(self._job.batch_sizes)}"
            )
        return True

    def _resumable(self, port: TrainerPort, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not state:
            return None
        # Before the trial runs again, so that it may still go on elsewhere. The job may have its size no more.
        self._splits(port, [TrialInfo.restored(state["trial"]).batch_size])
        return state

    def _splits(self, port: TrainerPort, batch_sizes: Sequence[int]) -> dict[int, BatchSplit]:
        """The spread of each of these sizes over the devices."""
        devices, accumulation = port.devices, port.accumulation
        most = self._options.max_per_device_batch_size
        found = {
            size: split_batch(size, world_size=devices, accumulation=accumulation, max_per_device=most)
            for size in batch_sizes
        }
        splits = {size: split for size, split in found.items() if split is not None}
        uneven = [size for size in batch_sizes if size not in splits]
        if uneven:
            raise ZeusBSOConfigError(
                f"the batch sizes {uneven} cannot be spread evenly over {devices} devices × {accumulation} accumulated "
                "batches: batch sizes are global, samples per optimizer step over all devices; choose multiples of "
                f"{devices * accumulation}"
            )
        if port.no_accumulation is not None and any(split.accumulation > 1 for split in splits.values()):
            raise ZeusBSOConfigError(
                f"{port.no_accumulation}, so sizes above max_per_device_batch_size={most} × {devices} devices cannot "
                "be reached: raise it, or drop those batch sizes from the job"
            )
        return splits

    def _synchronize(self) -> None:
        if self._cluster is not None:
            self._cluster.synchronize()

    def _reported(self, trial: TrialInfo, metric: float | None, epochs: float) -> TrialInfo:
        if metric is None or self._session is None:
            return trial
        self._session.report(metric, self._epochs.reported(epochs))
        return self._session.trial

    def _end(self, error: BaseException | None) -> None:
        if self._session is not None:
            self._session.end(error)
            if self._session.has_trial:
                self._trial = self._session.trial
            self._session = None
        elif self._takes_reports and error is not None:
            with self._connect(self._options.server_url, self._options.token) as client:
                end_trial_from_another_rank(client, self._trial, error)

    def _scale_back(self) -> None:
        while self._scaled:
            scale_learning_rate(*self._scaled.pop(), 1 / self._lr_factor)


def train_fail_error(verdict: ReportResponse | None) -> ZeusBSOTrainFailError:
    """The error of a training that has ended without reaching its target, after this latest verdict."""
    stopped = verdict is not None and verdict.stop_train
    reason = verdict.message if verdict is not None and stopped else "the training ended before the target was reached"
    return ZeusBSOTrainFailError(f"{reason}; launch the training again to try the next batch size")
