"""Reports of one trial to the server: sent at once or, if the server is away, kept in the outbox and sent later.

`TrialReporter` protects a training from failures of the server. While the server is away, the reporter judges
evaluations by the trial's stop rule. The reporter's thread sends heartbeats, and delivers the results in the outbox
when the server can be reached again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from zeus_plugins.client.delivery import deliver, is_refusal
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxHeader
from zeus_plugins.client.port import NO_RETRIES, ServerPort, last_requests
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import (
    FINAL,
    CreatedJob,
    Ending,
    Evaluation,
    ReportResponse,
    StopRule,
    TrainingResult,
    TrialId,
)

_logger = logging.getLogger("zeus_plugins")

# Seconds between heartbeats, until the server states an interval. This interval also bounds the wait between retries.
_INTERVAL_S = 60.0
_FIRST_RETRY_S = 1.0


def judged_without_server(
    job: CreatedJob, rule: StopRule, *, metric: float, epochs: float, cost_j: float | None
) -> ReportResponse:
    """Return the verdict that the server would give by `rule`; the cost bound does not apply to an unknown cost."""
    verdict = ReportResponse.of(rule.judge(job, metric=metric, epochs=epochs, cost_j=cost_j))
    return verdict.model_copy(update={"message": f"{verdict.message} (judged without the server)"})


class TrialReporter:
    """Sends a trial's results to the server and returns verdicts on them.

    No method raises an error of the server. The first error of each kind is logged as a warning, later ones for
    debugging.

    Args:
        sender: The trial, which the server may not have recorded yet.
        rule: The stop rule that came with the trial.
        takes_heartbeats: False for a Zeus server.
        resumes: Whether this run must still take the trial over from an earlier run of the training.

    Attributes:
        job: The trial's job, on its hardware.
        rule: The latest stop rule from the server.
    """

    def __init__(
        self,
        client: ServerPort,
        outbox: Outbox,
        sender: OutboxHeader,
        rule: StopRule,
        *,
        takes_heartbeats: bool,
        resumes: bool = False,
    ) -> None:
        self.sender = sender
        self.job = sender.registration
        self.rule = rule
        self._client = client
        self._outbox = outbox
        self._takes_heartbeats = takes_heartbeats
        self._warned: set[str] = set()
        self._woken, self._stopped = threading.Event(), threading.Event()
        # Results go straight to the server while nothing waits in the box.
        self._box = OutboxFile(sender, resumes=resumes)
        # Guards the box and the fields below.
        self._lock = self._box.lock
        # The server has refused the trial, so nothing more is sent.
        self._is_refused = False
        # The verdict that stops the trial, if a late delivery brought it.
        self._last_verdict: ReportResponse | None = None
        self._thread: threading.Thread | None = None
        self._thread_closes_box = False

    @property
    def trial(self) -> TrialId | None:
        """The trial, or None while the server has not recorded it."""
        with self._lock:
            return self._box.trial

    @property
    def is_away(self) -> bool:
        """True if the server still lacks results, the trial or its take-over, or has refused the trial."""
        with self._lock:
            return self._is_refused or not self._box.is_delivered

    def start(self, trouble: ZeusBSOError | None = None) -> None:
        """Start to send heartbeats if the server accepts them; the caller has already warned of `trouble`."""
        if trouble is not None:
            self._warned.add(_cause_of(trouble))
        if self._takes_heartbeats:
            self._wake_thread()

    def report_evaluation(self, evaluation: Evaluation) -> ReportResponse:
        """Return the server's verdict on an evaluation, or the verdict of the stop rule while the server is away.

        An evaluation that already has a `judged_by` keeps it.
        """
        with self._lock:
            if self._last_verdict is not None:
                return self._last_verdict
            trial = None if self.is_away else self._box.trial
        if trial is not None:
            try:
                verdict = self._client.send_report(TrainingResult(**trial.model_dump(), **evaluation.model_dump()))
            except Exception as error:
                self._notice(error)
            except BaseException:
                # Ctrl-C or SIGTERM during the wait: the server may have the report, and accepts it a second time.
                self._keep(evaluation)
                raise
            else:
                self.rule = verdict.stop_rule or self.rule
                return verdict
        rule = evaluation.judged_by or self.rule
        self._keep(evaluation.model_copy(update={"judged_by": rule}))
        cost_j = self.job.cost_j(time_s=evaluation.time, energy_j=evaluation.energy)
        return self.judge(rule, metric=evaluation.metric, epochs=evaluation.current_epoch, cost_j=cost_j)

    def judge(self, rule: StopRule, *, metric: float, epochs: float, cost_j: float | None = None) -> ReportResponse:
        """Judge an evaluation without the server; if its cost is unknown, only by the target and `max_epochs`."""
        verdict = judged_without_server(self.job, rule, metric=metric, epochs=epochs, cost_j=cost_j)
        self.rule = verdict.stop_rule or self.rule
        return verdict

    def send_nothing(self) -> None:
        """From now on, judge evaluations without the server, and neither keep nor send results."""
        with self._lock:
            self._is_refused = True
            self._box.refuse()

    def end(self, ending: Ending | None = None) -> None:
        """Stop the thread and try once more to deliver waiting reports; `ending` is None if a verdict ended the trial.

        Wait at most twice the client's time-out: once for a request of the thread, and once for this delivery.
        """
        if self._stopped.is_set():
            return
        closing = last_requests(self._client.timeout_s)
        self._stopped.set()
        self._woken.set()
        if ending is not None:
            # Write the ending to disk first: the process may be killed while it waits for the server.
            self._keep(ending)
        thread = self._thread
        if thread is not None:
            thread.join(self._client.timeout_s)
        with self._lock:
            # A thread that hangs in a request closes the box itself later. A fork does not have its parent's threads.
            self._thread_closes_box = hangs = self._thread is not None and self._thread.is_alive()
        if not hangs:
            try:
                with self._client.with_retries(closing) as client:
                    self._deliver(client, is_stopped=lambda: False)
            except Exception as error:
                self._notice(error)
        with self._lock:
            self._warn_of_waiting()
            if not hangs:
                self._box.close()

    def _warn_of_waiting(self) -> None:
        box, job_id, url = self._box, self.job.job_id, self._client.server_url
        with contextlib.suppress(OSError):  # A disk that was full may have room again.
            box.keep()
        if box.kept:
            _logger.warning(
                f"{box.kept} results of job {job_id} wait in {box.path} until the server at {url} takes them: the next "
                "training on this machine delivers them, or: zeus-plugins sync"
            )
        if len(box) > box.kept:
            _logger.warning(
                f"{len(box) - box.kept} results of job {job_id} are lost: the server at {url} is away, and they could "
                f"not be written to {self._outbox.directory}"
            )

    def _keep(self, item: Item) -> None:
        """Put `item` into the box; until the box has been delivered, later results are put into it, too."""
        with self._lock:
            if self._is_refused:
                return
            try:
                try:
                    self._outbox.put_on_disk(self._box)
                finally:
                    self._box.put(item)
            except OSError as error:
                self._warn(
                    "outbox",
                    f"cannot write to {self._outbox.directory} ({error}): results that wait for the server are lost if "
                    "this process ends before it is back",
                )
        self._wake_thread()

    def _notice(self, error: Exception) -> None:
        """Warn of an error of the server; if the error is a refusal, send nothing more of this trial."""
        cause = _cause_of(error)
        if not is_refusal(error):
            self._warn(
                cause,
                f"{error}. The training continues and is judged here; results wait in {self._outbox.directory} until "
                "the server takes them",
            )
            return
        self.send_nothing()
        self._warn(
            cause,
            f"the server refuses this trial: {error}. The training continues and is judged here, without further "
            "reports",
        )

    def _warn(self, cause: str, message: str) -> None:
        with self._lock:
            level = logging.DEBUG if cause in self._warned else logging.WARNING
            self._warned.add(cause)
        _logger.log(level, "%s", message)

    def _wake_thread(self) -> None:
        """Start the thread, or wake it if it runs; after `end`, start no new one."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                thread = threading.Thread(target=self._run, name="zeus-bso-heartbeat", daemon=True)
                with contextlib.suppress(RuntimeError):  # Exit functions can start no thread since Python 3.12.
                    thread.start()
                    self._thread = thread
        self._woken.set()

    def _run(self) -> None:
        try:
            with self._client.with_retries(NO_RETRIES) as client:
                self._beat_and_deliver(client)
        finally:
            with self._lock:
                self._thread = None
                if self._thread_closes_box:
                    self._box.close()

    def _beat_and_deliver(self, client: ServerPort) -> None:
        """Send heartbeats and deliver waiting reports until the reporter is stopped."""
        interval_s, retry_s = _INTERVAL_S, _FIRST_RETRY_S
        while not self._stopped.is_set():
            self._woken.clear()
            try:
                self._deliver(client, is_stopped=self._stopped.is_set)
                interval_s = self._beat(client) or interval_s
            except ZeusBSOError as error:
                self._notice(error)
                # New results do not shorten this wait: they queue behind the earlier ones.
                self._stopped.wait(retry_s)
                retry_s = min(2 * retry_s, interval_s)
            except Exception:
                # Do not end the training: without heartbeats the trial is abandoned, and its next report revives it.
                _logger.exception("the thread that sends heartbeats broke")
                break
            else:
                retry_s = _FIRST_RETRY_S
                self._woken.wait(interval_s)

    def _deliver(self, client: ServerPort, *, is_stopped: Callable[[], bool]) -> None:
        with self._lock:
            is_waiting, results = not (self._is_refused or self._box.is_delivered), len(self._box)
        if is_waiting:
            deliver(self._box, client, is_stopped=is_stopped, take_verdict=self._take_late_verdict)
        with self._lock:
            if is_waiting and not self.is_away:
                self._box.close()
                if results:
                    _logger.info("the server at %s took the results that waited (%d)", client.server_url, results)

    def _take_late_verdict(self, verdict: ReportResponse) -> None:
        if verdict.stop_rule is not None:
            # The server's rule does not yet count the evaluations that still wait here.
            self.rule = verdict.stop_rule.confirmed_as(self.rule)
        if verdict.stop_train:
            self._last_verdict = verdict

    def _beat(self, client: ServerPort) -> float | None:
        """Send a heartbeat if the server wants one; return the seconds until the next one is due, or None."""
        with self._lock:
            trial = None if self._is_refused else self._box.trial
        if trial is None or not self._takes_heartbeats or self._stopped.is_set():
            return None
        heard = client.heartbeat(trial)
        self._takes_heartbeats = heard.state not in FINAL
        return heard.interval_s


def _cause_of(error: Exception) -> str:
    return f"{type(error).__name__} {getattr(error, 'status', None)}"
