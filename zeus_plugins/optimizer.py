"""Batch size optimization for plain PyTorch training loops, with the interface of Zeus 0.16's optimizer.

Example:
    One recurrence of a job; launch the same script again and again, and each launch learns from the earlier ones::

        from zeus_plugins import BatchSizeOptimizer, JobSpec

        job = JobSpec(
            job_id="mnist-nightly", job_id_prefix="mnist", batch_sizes=[32, 64, 128, 256], default_batch_size=64,
            target_metric=0.95, max_epochs=20,
        )
        with BatchSizeOptimizer(monitor=None, server_url="http://127.0.0.1:8000", job=job) as optimizer:
            loader = DataLoader(dataset, batch_size=optimizer.get_batch_size(), shuffle=True)
            optimizer.on_train_begin()
            for epoch in range(job.max_epochs):
                train_one_epoch(model, loader)
                optimizer.on_evaluate(accuracy(model))
                if optimizer.training_finished:
                    break
"""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Self

from zeus_plugins import energy
from zeus_plugins.client import BsoClient, client_from_environment
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOTrainFailError
from zeus_plugins.protocol import JobSpec
from zeus_plugins.session import TrialSession

__all__ = ["BatchSizeOptimizer"]


class BatchSizeOptimizer:
    """Asks for a batch size, measures the training, and says when to stop.

    Call `get_batch_size`, `on_train_begin`, then `on_evaluate` after every epoch until `training_finished`. The
    module's docstring shows a whole loop. When the training ends in any other way (an exception, the end of the
    interpreter, the optimizer going out of use), the trial ends as failed, so that no later run waits for it.

    In distributed training only rank 0 uses the optimizer; it broadcasts the batch size and `training_finished` to the
    other ranks. On every other rank the constructor does nothing and each method raises.

    Args:
        monitor: Measures energy and time. None: the best one that this machine offers (`zeus_plugins.energy.auto`).
        server_url: The batch size optimization server. None: the environment variable ``ZEUS_SERVER_URL``.
        job: The recurring job.
        rank: Rank of this process in distributed training.
        token: The server's access token. None: the environment variable ``ZEUS_BSO_TOKEN``.
        client: Takes the place of `server_url` and `token`; it stays open when the optimizer is closed.

    Raises:
        ZeusBSOConfigError: There is no server URL, or an argument or ``ZEUS_JOB_ID`` cannot work.
    """

    def __init__(
        self,
        monitor: EnergyMonitor | None,
        server_url: str | None,
        job: JobSpec,
        rank: int = 0,
        *,
        token: str | None = None,
        client: BsoClient | None = None,
    ) -> None:
        self._rank = rank
        self._trial_session: TrialSession | None = None
        if rank != 0:
            return
        own_client = None
        if client is None:
            client = own_client = client_from_environment(server_url, token)
        self._trial_session = TrialSession(job, client, energy.auto() if monitor is None else monitor)
        # Runs when the optimizer is dropped and at the interpreter's exit, whichever comes first, and only once.
        self._finish = weakref.finalize(self, _finish, self._trial_session, own_client, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def training_finished(self) -> bool:
        """Whether the server said stop: the target was reached, or `on_evaluate` raised that the trial failed."""
        return self._session.finished

    def get_batch_size(self) -> int:
        """Start a trial and return its batch size; later calls return the same.

        Returns:
            The GLOBAL batch size: samples per optimizer step over all devices.

        Raises:
            ZeusBSOBadOperationError: This is not rank 0.
            ZeusBSOConfigError: The server refuses the job.
            ZeusBSORuntimError: The server cannot be reached or fails.
        """
        return self._session.trial.batch_size if self._session.has_trial else self._session.ask()

    def on_train_begin(self) -> None:
        """Begin to measure; call it once, right before the first epoch.

        Raises:
            ZeusBSOBadOperationError: This is not rank 0.
            ZeusBSOOperationOrderError: `get_batch_size` was not called yet, or this was called before.
        """
        self._session.begin_measurement()

    def on_evaluate(self, metric: float) -> None:
        """Report the validation metric; each call counts one epoch.

        Args:
            metric: The validation metric after this epoch.

        Raises:
            ZeusBSOTrainFailError: The trial is over without having reached the target metric.
            ZeusBSOBadOperationError: This is not rank 0.
            ZeusBSOOperationOrderError: `on_train_begin` was not called yet, or the training is finished.
            ZeusBSORuntimError: The server cannot be reached or fails. The epoch counts nevertheless, and its time and
                energy are part of the next report.
        """
        verdict = self._session.report(metric)
        if self._session.failed:
            raise ZeusBSOTrainFailError(f"{verdict.message}; launch the training again to try the next batch size")

    def close(self) -> None:
        """End the trial (as failed when it is not finished) and close the connection. Safe to call more than once."""
        if self._rank == 0:
            self._finish()

    @property
    def _session(self) -> TrialSession:
        if self._trial_session is None:
            raise ZeusBSOBadOperationError(
                f"this is rank {self._rank}, and only rank 0 talks to the server: call it on rank 0 and broadcast the "
                "result to the other ranks"
            )
        return self._trial_session


def _finish(session: TrialSession, own_client: BsoClient | None, owner_pid: int) -> None:
    # A forked child (a data loader's worker) inherits this call, but the trial is still running in its parent.
    if os.getpid() != owner_pid:
        return
    session.end()
    if own_client is not None:
        own_client.close()
