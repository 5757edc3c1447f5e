"""One trial's line to the server: its results arrive at once or, while the server is away, later.

`TrialReporter` is what keeps a server's troubles out of a training. While the server is away it answers in its place,
by the stop rule that came with the trial, and puts the results into the outbox. A thread of its own sends heartbeats,
and delivers what waits as soon as the server is back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from zeus_plugins.client.delivery import deliver, deliver_power_limits, is_refusal, recorded, taken_over
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxHeader
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import (
    FINAL,
    Ending,
    Evaluation,
    JobRegistration,
    PowerLimitChoice,
    ReportResponse,
    StopRule,
    TrainingResult,
    TrialId,
)

_logger = logging.getLogger("zeus_plugins")

# Between heartbeats until the server says how many are wanted, and between attempts to reach one that is away.
_INTERVAL_S = 30.0
_FIRST_RETRY_S = 1.0


def judged_without_server(
    job: JobRegistration, rule: StopRule, *, metric: float, epochs: float, cost_j: float | None
) -> ReportResponse:
    """The verdict that the server would give by this rule; without a cost so far, its bound does not apply."""
    verdict = ReportResponse.of(rule.judge(job, metric=metric, epochs=epochs, cost_j=cost_j))
    return verdict.model_copy(update={"message": f"{verdict.message} (judged without the server)"})


class TrialReporter:
    """Takes a trial's results, gives verdicts on them, and sees to it that the server gets them.

    No method raises because of the server. One warning tells of each kind of trouble, at its first time. The sender's
    trial may be one that the server has not recorded yet, or one that it has not given to this run, which `resumes`;
    a Zeus server takes no heartbeats.
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
        self._client = client
        self._outbox = outbox
        self._sender = sender
        self.job = sender.registration
        self._rule = rule
        self._takes_heartbeats = takes_heartbeats
        self._trial = sender.trial
        # While it does, everything goes through the box: the trial is still to be taken over from an earlier run.
        self._resumes = resumes
        self._box: OutboxFile | None = None
        # What the thread is to send next.
        self._power_limits: PowerLimitChoice | None = None
        self._verdict: ReportResponse | None = None
        self._is_refused = False
        self._warned: set[str] = set()
        # Of the fields above, and of the box.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_thread_through = True
        self._is_left_to_thread = False
        self._is_ended = False

    @property
    def trial(self) -> TrialId | None:
        """The trial, or None while the server has not recorded it."""
        with self._lock:
            return self._trial

    @property
    def sender(self) -> OutboxHeader:
        """The trial to which waiting results belong."""
        return self._sender

    @property
    def is_away(self) -> bool:
        """True if results wait for the server, or it refuses them; or it has not heard that this run resumes."""
        with self._lock:
            return self._box is not None or self._is_refused or self._resumes

    @property
    def rule(self) -> StopRule:
        """The stop rule as the server said it last."""
        with self._lock:
            return self._rule

    def note_as_warned(self, error: ZeusBSOError) -> None:
        """Remember that the user has been warned of this trouble already."""
        self._warned.add(_cause_of(error))

    def start(self) -> None:
        """Begin to send heartbeats, if the server takes them."""
        if self._takes_heartbeats:
            self._start_thread()

    def report(self, evaluation: Evaluation) -> ReportResponse:
        """Report an evaluation: the server's verdict, or that of its rule while it is away.

        An evaluation that says by which rule it was judged keeps that one while it waits.
        """
        with self._lock:
            if self._verdict is not None:  # It came with what was delivered later.
                return self._verdict
            trial = None if self.is_away else self._trial
        if trial is not None:
            try:
                verdict = self._client.report(TrainingResult(**trial.model_dump(), **evaluation.model_dump()))
            except Exception as error:
                self._notice(error)
            except BaseException:
                # Ctrl-C or SIGTERM during the wait. The server may have it, and takes it twice without harm.
                self._keep(evaluation)
                raise
            else:
                with self._lock:
                    self._rule = verdict.stop_rule or self._rule
                return verdict
        rule = evaluation.judged_by or self.rule
        self._keep(evaluation.model_copy(update={"judged_by": rule}))
        return judged_without_server(
            self.job,
            rule,
            metric=evaluation.metric,
            epochs=evaluation.current_epoch,
            cost_j=self.job.cost_j(time_s=evaluation.time, energy_j=evaluation.energy),
        )

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the thread send the trial's power limits, now or later: no step of a training waits for a server."""
        with self._lock:
            if self._is_refused:
                return
            self._power_limits = choice
        self._start_thread()
        self._wake.set()

    def judge_unmeasured(self, *, metric: float, epoch: float) -> ReportResponse:
        """The verdict on a training whose cost is no longer known: the target and `max_epochs` remain."""
        return judged_without_server(self.job, self.rule, metric=metric, epochs=epoch, cost_j=None)

    def end(self, ending: Ending | None = None) -> None:
        """End the line, after one last attempt to deliver what waits; without an ending, a verdict ended the trial."""
        if self._is_ended:
            return
        self._is_ended = True
        self._stopped.set()
        if ending is not None:
            # First to the disk: whoever ends the training may not have the patience for a server.
            self._keep(ending)
        if self._stop_thread():
            try:
                with self._client.with_retries(NO_RETRIES) as client:
                    self._send_power_limits(client)
                    self._deliver(client, is_stopped=lambda: False)
            except Exception as error:
                self._notice(error)
        with self._lock:
            self._tell_what_waits()
            self._is_left_to_thread = not self._is_thread_through
            if not self._is_left_to_thread:
                self._close_box()

    def _tell_what_waits(self) -> None:
        box, url = self._box, self._client.server_url
        if box is None or not len(box):
            return
        with contextlib.suppress(OSError):  # There may be room again.
            box.keep()
        kept, lost = box.kept, len(box) - box.kept
        if kept:
            _logger.warning(
                "%d results of job %s wait in %s until the server at %s takes them: the next training on this machine "
                "delivers them, or: zeus-plugins sync",
                *(kept, self.job.job_id, box.path, url),
            )
        if lost:
            _logger.warning(
                "%d results of job %s are lost: the server at %s is away, and they could not be written to %s",
                *(lost, self.job.job_id, url, self._outbox.directory),
            )

    def _close_box(self) -> None:
        if self._box is not None:
            self._box.close()
            self._box = None

    def _start_thread(self) -> None:
        if self._thread is None and not self._stopped.is_set():
            self._is_thread_through = False
            self._thread = threading.Thread(target=self._run, name="zeus-bso-heartbeat", daemon=True)
            self._thread.start()

    def _stop_thread(self) -> bool:
        """Whether it has stopped. Where it hangs in a request, it lets the box go once it is through."""
        self._stopped.set()
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(self._client.timeout_s + 1)
        return not self._thread.is_alive()

    def _keep(self, item: Item) -> None:
        """Put something into the outbox; from then on everything goes there until the server is back."""
        with self._lock:
            if self._is_refused:
                return
            # As the server knows it by now.
            sender = self._sender.model_copy(update={"trial": self._trial})
            try:
                if self._box is None:
                    self._box = self._outbox.box(sender)
                    known = self._box.trial or self._trial
                    if self._resumes or known != self._box.trial:
                        self._box.name(known, resumes=self._resumes)
                self._box.put(item)
            except OSError as error:
                self._warn(
                    "outbox",
                    f"cannot write to {self._outbox.directory} ({error}): results that wait for the server are lost if "
                    "this process ends before it is back",
                )
                if self._box is None:
                    self._box = OutboxFile(self._outbox.directory / sender.file_name(), None, sender)
                    self._box.resumes = self._resumes
                    self._box.put(item)
        self._start_thread()
        self._wake.set()

    def _notice(self, error: Exception) -> None:
        """Say once what is wrong; give up a trial that the server does not want."""
        cause = _cause_of(error)
        if not is_refusal(error):
            self._warn(
                cause,
                f"{error}. The training goes on and is judged here; results wait in {self._outbox.directory} until the "
                "server takes them",
            )
            return
        with self._lock:
            self._is_refused = True
            if self._box is not None:
                self._box.refuse()
                self._box = None
        self._warn(
            cause,
            f"the server refuses this trial: {error}. The training goes on and is judged here, and nothing more of it "
            "is reported",
        )

    def _warn(self, cause: str, message: str) -> None:
        with self._lock:
            level = logging.DEBUG if cause in self._warned else logging.WARNING
            self._warned.add(cause)
        _logger.log(level, "%s", message)

    def _run(self) -> None:
        try:
            self._beat_and_deliver()
        finally:
            with self._lock:
                self._is_thread_through = True
                if self._is_left_to_thread:
                    self._close_box()

    def _beat_and_deliver(self) -> None:
        interval_s, retry_s = _INTERVAL_S, _FIRST_RETRY_S
        with self._client.with_retries(NO_RETRIES) as client:
            while not self._stopped.is_set():
                self._wake.clear()
                try:
                    self._send_power_limits(client)
                    self._deliver(client, is_stopped=self._stopped.is_set)
                    interval_s = self._beat(client) or interval_s
                except ZeusBSOError as error:
                    self._notice(error)
                    # Results that come meanwhile wait with the others.
                    self._stopped.wait(retry_s)
                    retry_s = min(2 * retry_s, interval_s)
                except Exception:
                    # Not worth a training: without heartbeats the trial is abandoned, until its next report.
                    _logger.exception("the thread that sends heartbeats broke")
                    break
                else:
                    retry_s = _FIRST_RETRY_S
                    self._wake.wait(interval_s)

    def _send_power_limits(self, client: ServerPort) -> None:
        """Send power limits that were not sent; while the server is away, or does not know the trial yet, they wait."""
        with self._lock:
            choice, self._power_limits = self._power_limits, None
            trial = self._trial
            if choice is None or self._is_refused:
                return
        if trial is None:
            self._keep(choice)
            return
        try:
            deliver_power_limits(client, trial, choice)
        except BaseException:
            self._keep(choice)
            raise

    def _deliver(self, client: ServerPort, *, is_stopped: Callable[[], bool]) -> None:
        """Deliver what waits, and have a trial recorded that is not."""
        with self._lock:
            box, trial = self._box, self._trial
            if self._is_refused or (box is None and trial is not None and not self._resumes):
                return
        if box is None:
            trial = trial or recorded(client, self._sender)
            if self._resumes:
                trial, _ = taken_over(client, trial)
            with self._lock:
                self._trial, self._resumes = trial, False
                if self._box is not None:  # Something was put in meanwhile.
                    self._box.name(trial)
            return
        waiting = len(box)
        try:
            verdict = deliver(box, client, lock=self._lock, is_stopped=is_stopped)
        finally:
            with self._lock:
                self._trial, self._resumes = box.trial, box.resumes
        with self._lock:
            if verdict is not None:
                self._rule = verdict.stop_rule or self._rule
                self._verdict = verdict if verdict.stop_train else None
            if not len(box):
                self._close_box()
                _logger.info("the server at %s took the results that waited (%d)", client.server_url, waiting)

    def _beat(self, client: ServerPort) -> float | None:
        """Send a heartbeat; seconds until the next, or None where none is wanted."""
        trial = self.trial
        if trial is None or self._is_refused or not self._takes_heartbeats or self._stopped.is_set():
            return None
        heard = client.heartbeat(trial)
        self._takes_heartbeats = heard.state not in FINAL
        return heard.interval_s


def _cause_of(error: Exception) -> str:
    return f"{type(error).__name__} {getattr(error, 'status', None)}"
