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
            optimizer.scale_learning_rate(sgd)  # its rate was chosen for the default size, 64
            optimizer.on_train_begin()
            for epoch in range(job.max_epochs):
                train_one_epoch(model, loader)
                optimizer.on_evaluate(accuracy(model))
                if optimizer.training_finished:
                    break
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Never, Self

from zeus_plugins import energy
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.energy.processes import synchronize
from zeus_plugins.errors import ZeusBSOBadOperationError
from zeus_plugins.protocol import JobSpec
from zeus_plugins.signals import raise_at_sigterm, termination
from zeus_plugins.training.arguments import refuse_unknown
from zeus_plugins.training.defaults import as_job
from zeus_plugins.training.lr_scaling import LrScaling, lr_factor, lr_scaling_in_words, scale_learning_rate
from zeus_plugins.training.outcomes import show_in_one_paragraph, train_fail_error
from zeus_plugins.training.session import TrialSession

__all__ = ["BatchSizeOptimizer"]

_logger = logging.getLogger("zeus_plugins")


class BatchSizeOptimizer:
    """Asks for a batch size, measures the training, and says when to stop.

    Call `get_batch_size`, `on_train_begin`, then `on_evaluate` after every epoch until `training_finished`; the
    module's docstring shows a whole loop. If the training ends before that, the trial ends with it: Ctrl-C and SIGTERM
    suspend the trial, running out of memory excludes its size, and after any other end (another exception, the end of
    the interpreter, or of the optimizer's life) a later run tries the size again.

    In distributed training only rank 0 asks for a batch size. Either it alone uses the optimizer, and broadcasts the
    batch size and `training_finished`; or every rank sets `current_batch_size` and `trial_number` to those of rank 0,
    and calls `on_train_begin` and `on_evaluate` with the same metric (examples/plain_ddp.py shows the first way). The
    server decides by the first report on each epoch, and every rank gets that verdict. On rank 1 and above,
    `get_batch_size` raises `ZeusBSOBadOperationError`, as do the other methods until both attributes are set.

    Args:
        monitor: Measures energy and time; Zeus's `ZeusMonitor` is accepted. None: the best monitor that this machine
            offers (`zeus_plugins.energy.auto`).
        server_url: The batch size optimization server, which gets the token of ``ZEUS_BSO_TOKEN``. None: the
            environment variable ``ZEUS_SERVER_URL``, or else a server in this process, on a SQLite file (needs the
            extra ``server``).
        job: The recurring job, or a mapping of its fields.
        rank: Rank of this process in distributed training.
        client: Replaces `server_url`; stays open when the optimizer is closed.
        **unknown: Not allowed: raises an error that names the right argument.

    Raises:
        ZeusBSOConfigError: An argument is unknown, an argument or ``ZEUS_JOB_ID`` cannot work, or there is no server
            URL and the server is not installed here.
    """

    def __init__(
        self,
        monitor: EnergyMonitor | WindowMonitor | None,
        server_url: str | None,
        job: JobSpec | Mapping[str, Any],
        rank: int = 0,
        *,
        client: ServerPort | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self._rank = rank
        self._trial_session: TrialSession | None = None
        self._own_client: ServerPort | None = None
        self._scaling = "rate none"
        self._told: dict[str, int] = {}  # the trial of rank 0, as the script sets it on other ranks
        self._arguments = as_job(job), client, server_url, monitor
        if rank == 0:
            self._open_session()

    def _open_session(self) -> TrialSession:
        job, client, server_url, monitor = self._arguments
        if client is None:
            client = self._own_client = client_from_environment(server_url)
        monitor = energy.auto() if monitor is None else monitor
        session = TrialSession(job, client, monitor, rank=self._rank)
        self._trial_session = session
        self._see_to_the_end()
        return session

    def _see_to_the_end(self) -> None:
        self._owner_pid = os.getpid()
        self._undo_signals: list[Callable[[], None]] = []
        # Runs once, when the optimizer is dropped or the interpreter exits.
        self._finish = weakref.finalize(
            self, _finish, self._session, self._own_client, self._owner_pid, self._undo_signals
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if name != "_finish"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._trial_session is not None:
            self._see_to_the_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A forked child that leaves the block must not end its parent's trial.
        if self._trial_session is not None and os.getpid() == self._owner_pid:
            self._trial_session.end(exc)
        self.close()

    @property
    def training_finished(self) -> bool:
        """True if the server said stop: the target was reached, or `on_evaluate` raised."""
        return self._session.finished

    @property
    def current_batch_size(self) -> int:
        """The trial's GLOBAL batch size; set it to that of rank 0 on the other ranks."""
        return self._told.get("current_batch_size") or self._session.trial.batch_size

    @current_batch_size.setter
    def current_batch_size(self, batch_size: int) -> None:
        self._tell("current_batch_size", batch_size, least=1)

    @property
    def trial_number(self) -> int:
        """The trial's number, 0 while the server does not know it; set it to that of rank 0 on the other ranks."""
        told = self._told.get("trial_number")
        return self._session.trial.trial_number or 0 if told is None else told

    @trial_number.setter
    def trial_number(self, trial_number: int) -> None:
        self._tell("trial_number", trial_number, least=0)

    def _tell(self, name: str, value: int, *, least: int) -> None:
        """Store a value of rank 0 on another rank; on rank 0, and once the training has begun, refuse another value."""
        if int(value) < least:
            raise ZeusBSOBadOperationError(f"{name} is {value}: set it to the {name} of rank 0, {least} or more")
        if self._trial_session is None:
            self._told[name] = int(value)
        elif value != getattr(self, name):
            raise ZeusBSOBadOperationError(
                f"{name} is {getattr(self, name)} in this trial, not {value}: for another trial make a new optimizer"
            )

    def get_batch_size(self) -> int:
        """Start a trial and return its batch size; later calls return the same.

        While the server is away, this is the job's default size, and the trial is recorded later.

        Returns:
            The GLOBAL batch size: samples per optimizer step over all devices.

        Raises:
            ZeusBSOConfigError: The server refuses the job or the token.
            ZeusBSORuntimeError: The server refuses for another reason.
        """
        if self._rank != 0:
            raise ZeusBSOBadOperationError(
                f"this is rank {self._rank}, and only rank 0 asks for a batch size: call get_batch_size() there, and "
                "broadcast current_batch_size and trial_number, to be set here"
            )
        if not self._session.has_trial:
            self._session.ask()
            trial = self._session.trial
            reason = trial.reason or "chosen by the server"
            target = self._session.plan.target_in_words
            reason += f"; {target}" if target else ""
            _logger.info("job %s, %s: batch size %d (%s)", trial.job_id, trial.name, trial.batch_size, reason)
            self._undo_signals.append(raise_at_sigterm())
        return self._session.trial.batch_size

    def scale_learning_rate(self, optimizer: Any, *schedulers: Any) -> None:
        """Scale the rates of a torch optimizer and its schedulers, chosen for the default size, to this trial's size.

        The rule is ``lr_scaling="auto"`` of the callbacks, which raises rates above the default size only, by the kind
        of the optimizer (docs/schedules.md). On rank 1 and above, set `current_batch_size` first.
        """
        default, size = self._arguments[0].default_batch_size, self.current_batch_size
        factor, self._scaling = lr_factor(LrScaling.AUTO, size, default, optimizer), "rate auto"
        scale_learning_rate([optimizer], schedulers, lambda _: factor)
        if self._rank == 0 and size != default:
            _logger.info("learning rate %s", lr_scaling_in_words(LrScaling.AUTO, factor, optimizer))

    def on_train_begin(self) -> None:
        """Begin to measure; call it once, right before the first epoch.

        Raises:
            ZeusBSOOperationOrderError: `get_batch_size` has not been called, or this method has.
        """
        if self._trial_session is None and len(self._told) == 2:
            self._open_session().join(self.current_batch_size, self.trial_number)
        synchronize()
        self._session.begin_measurement(scaling=None if self._rank else self._scaling)

    def on_evaluate(self, metric: float) -> None:
        """Report the validation metric after an epoch; each call counts one epoch.

        While the server is away, its last rule decides whether the training continues.

        Raises:
            ZeusBSOTrainFailError: The trial is over without having reached the target metric.
            ZeusBSOOperationOrderError: `on_train_begin` has not been called, or the training is finished.
        """
        synchronize()
        verdict = self._session.report_evaluation(metric)
        trial = self._session.trial
        if trial.is_over and trial.busy_remark is not None:
            _logger.warning("%s of job %s ran %s", trial.name, trial.job_id, trial.busy_remark)
        if verdict.stop_train and not verdict.converged:
            show_in_one_paragraph()
            raise train_fail_error(verdict, trial.advice)

    def watch(self, **values: float) -> None:
        """Record further metrics with the next `on_evaluate`; of each name, the last value of the run counts.

        Values of different batch sizes are compared (docs/target.md). After the last `on_evaluate` it is too late.
        """
        self._session.watch(values)

    def close(self) -> None:
        """End the trial (as failed if unfinished) and close the connection. Safe to call more than once."""
        if self._trial_session is not None:
            self._finish()

    @property
    def _session(self) -> TrialSession:
        if self._trial_session is None:
            raise ZeusBSOBadOperationError(
                f"this is rank {self._rank}, which reports beside rank 0 or leaves everything to it: to report, set "
                "current_batch_size and trial_number to those of rank 0 and call on_train_begin()"
            )
        return self._trial_session


def _finish(
    session: TrialSession, own_client: ServerPort | None, owner_pid: int, undo_signals: list[Callable[[], None]]
) -> None:
    # A forked child, such as a data loader's worker, inherits this call, but the trial runs on in its parent.
    if os.getpid() != owner_pid:
        return
    for undo in undo_signals:
        undo()
    session.end(_uncaught())
    if own_client is not None:
        own_client.close()


def _uncaught() -> BaseException | None:
    """Return the exception that ends this process, or None.

    At an interactive prompt the process continues, and the last exception need not concern the training.
    """
    if hasattr(sys, "ps1"):
        return None
    return termination() or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
