"""One trial's line to the server: its results arrive at once or, while the server is away, later.

`TrialReporter` is what keeps a server's troubles out of a training. While the server is away it answers in its place,
by the stop rule that came with the trial, and puts the results into the outbox. Its `_DeliveryThread` sends heartbeats,
and delivers what waits as soon as the server is back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from enum import Enum, auto

from zeus_plugins.client.delivery import deliver, deliver_power_limits, is_refusal
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxHeader
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import (
    FINAL,
    CreatedJob,
    Ending,
    Evaluation,
    PowerLimitChoice,
    ReportResponse,
    StopRule,
    TrainingResult,
    TrialId,
)

_logger = logging.getLogger("zeus_plugins")

# Between heartbeats until the server says how many are wanted, and between attempts to reach one that is away.
_INTERVAL_S = 60.0
_FIRST_RETRY_S = 1.0


def judged_without_server(
    job: CreatedJob, rule: StopRule, *, metric: float, epochs: float, cost_j: float | None
) -> ReportResponse:
    """Return the verdict that the server would give by this rule; without a cost so far, its bound does not apply."""
    verdict = ReportResponse.of(rule.judge(job, metric=metric, epochs=epochs, cost_j=cost_j))
    return verdict.model_copy(update={"message": f"{verdict.message} (judged without the server)"})


class _State(Enum):
    """The way of a trial's results to the server."""

    DIRECT = auto()
    """The server has the trial and all its results: each result is sent at once."""
    AWAY = auto()
    """Results wait in the box, or the trial is still to be recorded or taken over: the thread sees to both."""
    REFUSED = auto()
    """The server does not want the trial: nothing more is sent."""


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
        self.sender = sender
        self._client = client
        self._outbox = outbox
        self._takes_heartbeats = takes_heartbeats
        self._warned: set[str] = set()
        # Guards the fields below and the box.
        self._lock = threading.RLock()
        self._rule = rule
        self._box = OutboxFile(sender, resumes=resumes)
        self._state = _State.DIRECT if self._box.is_delivered else _State.AWAY
        # The server's last word, if it came with a result that was delivered later.
        self._verdict: ReportResponse | None = None
        # To be sent by the thread.
        self._power_limits: PowerLimitChoice | None = None
        self._thread = _DeliveryThread(self._beat_and_deliver)

    @property
    def job(self) -> CreatedJob:
        """The trial's job, on its hardware."""
        return self.sender.registration

    @property
    def trial(self) -> TrialId | None:
        """The trial, or None while the server has not recorded it."""
        with self._lock:
            return self._box.trial

    @property
    def is_away(self) -> bool:
        """True if the server does not have all results, or refuses them; or it has not heard that this run resumes."""
        with self._lock:
            return self._state is not _State.DIRECT

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
            self._thread.start()

    def report_evaluation(self, evaluation: Evaluation) -> ReportResponse:
        """Report an evaluation: the server's verdict, or that of its rule while it is away.

        An evaluation that says by which rule it was judged keeps that one while it waits.
        """
        with self._lock:
            if self._verdict is not None:
                return self._verdict
            trial = self._box.trial if self._state is _State.DIRECT else None
        if trial is not None:
            try:
                verdict = self._client.send_report(TrainingResult(**trial.model_dump(), **evaluation.model_dump()))
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
            if self._state is _State.REFUSED:
                return
            self._power_limits = choice
        self._thread.start()

    def judge_unmeasured(self, *, metric: float, epoch: float) -> ReportResponse:
        """Judge a training whose cost is no longer known: the target and `max_epochs` remain."""
        return judged_without_server(self.job, self.rule, metric=metric, epochs=epoch, cost_j=None)

    def end(self, ending: Ending | None = None) -> None:
        """End the line, after one last attempt to deliver what waits; without an ending, a verdict ended the trial."""
        if self._thread.stopped.is_set():
            return
        self._thread.stop()
        if ending is not None:
            # First to the disk: whoever ends the training may not have the patience for a server.
            self._keep(ending)
        is_through = self._thread.join(self._client.timeout_s + 1, otherwise=self._close_box)
        if is_through:
            try:
                with self._client.with_retries(NO_RETRIES) as client:
                    self._deliver(client, is_stopped=lambda: False)
            except Exception as error:
                self._notice(error)
        with self._lock:
            self._tell_what_waits()
            if is_through:
                self._close_box()

    def _tell_what_waits(self) -> None:
        box, job_id, url = self._box, self.job.job_id, self._client.server_url
        with contextlib.suppress(OSError):  # There may be room again.
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

    def _close_box(self) -> None:
        with self._lock:
            self._box.close()

    def _keep(self, item: Item) -> None:
        """Put something into the box; from then on everything goes there until the server is back."""
        with self._lock:
            if self._state is _State.REFUSED:
                return
            self._state = _State.AWAY
            try:
                try:
                    # What is in memory alone may be under way to the server, and stays in its place.
                    if not self._box.is_on_disk and not len(self._box):
                        self._outbox.put_on_disk(self._box)
                finally:
                    self._box.put(item)
            except OSError as error:
                self._warn(
                    "outbox",
                    f"cannot write to {self._outbox.directory} ({error}): results that wait for the server are lost if "
                    "this process ends before it is back",
                )
        self._thread.start()

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
            self._state = _State.REFUSED
            self._box.refuse()
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

    def _beat_and_deliver(self) -> None:
        """Send heartbeats and deliver what waits until the thread is stopped."""
        thread, interval_s, retry_s = self._thread, _INTERVAL_S, _FIRST_RETRY_S
        with self._client.with_retries(NO_RETRIES) as client:
            while not thread.stopped.is_set():
                thread.woken.clear()
                try:
                    self._deliver(client, is_stopped=thread.stopped.is_set)
                    interval_s = self._beat(client) or interval_s
                except ZeusBSOError as error:
                    self._notice(error)
                    # Results that come meanwhile wait with the others.
                    thread.stopped.wait(retry_s)
                    retry_s = min(2 * retry_s, interval_s)
                except Exception:
                    # Not worth a training: without heartbeats the trial is abandoned, until its next report.
                    _logger.exception("the thread that sends heartbeats broke")
                    break
                else:
                    retry_s = _FIRST_RETRY_S
                    thread.woken.wait(interval_s)

    def _deliver(self, client: ServerPort, *, is_stopped: Callable[[], bool]) -> None:
        """Send power limits that were not sent; have the trial recorded or taken over, and deliver what waits."""
        self._send_power_limits(client)
        with self._lock:
            if self._state is not _State.AWAY:
                return
            waiting = len(self._box)
        verdict = deliver(self._box, client, lock=self._lock, is_stopped=is_stopped)
        with self._lock:
            if verdict is not None:
                self._rule = verdict.stop_rule or self._rule
                self._verdict = verdict if verdict.stop_train else None
            if self._state is _State.AWAY and self._box.is_delivered:
                self._box.close()
                self._state = _State.DIRECT
                if waiting:
                    _logger.info("the server at %s took the results that waited (%d)", client.server_url, waiting)

    def _send_power_limits(self, client: ServerPort) -> None:
        with self._lock:
            choice, self._power_limits = self._power_limits, None
            trial = None if self._box.resumes else self._box.trial
            if choice is None or self._state is _State.REFUSED:
                return
        if trial is None:
            self._keep(choice)
            return
        try:
            deliver_power_limits(client, trial, choice)
        except BaseException:
            self._keep(choice)
            raise

    def _beat(self, client: ServerPort) -> float | None:
        """Send a heartbeat; seconds until the next, or None where none is wanted."""
        with self._lock:
            trial = None if self._state is _State.REFUSED else self._box.trial
        if trial is None or not self._takes_heartbeats or self._thread.stopped.is_set():
            return None
        heard = client.heartbeat(trial)
        self._takes_heartbeats = heard.state not in FINAL
        return heard.interval_s


class _DeliveryThread:
    """A daemon thread that does a reporter's work from its first start until it is `stopped`.

    What is to be done at once sets `woken`.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.woken, self.stopped = threading.Event(), threading.Event()
        # Guards the fields below.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._at_end: Callable[[], None] | None = None

    def start(self) -> None:
        """Start it, or wake it if it runs; once it was stopped, do nothing."""
        with self._lock:
            if self._thread is None and not self.stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="zeus-bso-heartbeat", daemon=True)
                self._thread.start()
        self.woken.set()

    def stop(self) -> None:
        """Tell it to stop, and go on."""
        self.stopped.set()
        self.woken.set()

    def join(self, timeout_s: float, *, otherwise: Callable[[], None]) -> bool:
        """Wait until it has stopped; True if it has. `otherwise` it hangs in a request, and does that at its end."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # A fork has its parent's threads no more.
                return True
            self._at_end = otherwise
            return False

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._lock:
                self._thread = None
                at_end = self._at_end
            if at_end is not None:
                at_end()


def _cause_of(error: Exception) -> str:
    return f"{type(error).__name__} {getattr(error, 'status', None)}"
