"""The master, which launches each run of a recurring training script at the batch size that an optimizer chooses."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Never

from zeus_plugins import energy, environment
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOTrainFailError
from zeus_plugins.master.executors import Launch, execute, lock_file, try_lock, wait_for_end
from zeus_plugins.master.history import (
    HISTORY_FILE,
    MAX_TRIES,
    MasterState,
    PlannedRun,
    Run,
    begun_in_words,
    ended_in_words,
)
from zeus_plugins.master.job import Job
from zeus_plugins.master.optimizers import ServerOptimizer
from zeus_plugins.protocol import LEAST_TIME_S, MAX_DETAIL_LENGTH, GpuConfig, TrialState, cost
from zeus_plugins.train_result import TrainResult, result_path
from zeus_plugins.training.arguments import refuse_unknown
from zeus_plugins.training.outcomes import outcome_of

_LOCK_FILE = ".master.lock"


class ZeusMaster:
    """Runs a recurring training script, with the interface of Zeus's master.

    The master saves its state after every run. To resume a killed master, pass its log directory to `run` as
    `resume_from`. The resumed master waits for a script that still runs, and neither repeats nor loses a run.

    Args:
        batch_size_optimizer: Chooses the batch size of each run.
        log_base: Directory of all log directories.
        seed: Seed of the first run; each run increments it.
        profile_warmup_iters: Iterations of warm-up for each power limit.
        profile_measure_iters: Iterations of measurement for each power limit.
        gpus: The accelerators that the job runs on, for the cost. None: the devices of this machine.
        **unknown: Not allowed: raises an error that names the right argument.

    Raises:
        ZeusBSOConfigError: An argument is invalid.
    """

    def __init__(
        self,
        batch_size_optimizer: ServerOptimizer,
        log_base: str | Path,
        seed: int = 123456,
        profile_warmup_iters: int = 10,
        profile_measure_iters: int = 40,
        *,
        gpus: GpuConfig | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self), unknown)
        if not hasattr(batch_size_optimizer, "observe_run"):
            raise ZeusBSOConfigError(
                f"a {type(batch_size_optimizer).__name__} cannot choose the batch sizes: pass a ServerOptimizer, with "
                'options={"policy": "zeus"} for the decisions of Zeus\'s optimizers'
            )
        if profile_warmup_iters < 0 or profile_measure_iters < 1:
            raise ZeusBSOConfigError(
                f"profile_warmup_iters is {profile_warmup_iters} and profile_measure_iters {profile_measure_iters}: "
                "they must be at least 0 and 1"
            )
        self._optimizer = batch_size_optimizer
        self._log_base = Path(log_base).absolute()
        self._seed = seed
        self._profile_params = f"{profile_warmup_iters},{profile_measure_iters}"
        self._gpus = gpus

    def build_logdir(
        self, job: Job, num_recurrence: int, eta_knob: float, beta_knob: float | None, exist_ok: bool = True
    ) -> str:
        """Make a log directory, named by the job, the knobs and the present time.

        Returns:
            Its absolute path, ``{log_base}/{name}+x{recurrences}+eta{η}+beta{β}+{YYYYmmdd-HHMMSS}``.

        Raises:
            FileExistsError: The directory exists, and `exist_ok` is false.
        """
        knobs = f"x{num_recurrence}+eta{eta_knob}+beta{beta_knob}"
        path = self._log_base / f"{job.name}+{knobs}+{datetime.now():%Y%m%d-%H%M%S}"
        path.mkdir(parents=True, exist_ok=exist_ok)
        return str(path)

    def run(
        self,
        job: Job,
        num_recurrence: int,
        batch_sizes: Sequence[int],
        beta_knob: float | None,
        eta_knob: float,
        *,
        logdir: str | Path | None = None,
        resume_from: str | Path | None = None,
    ) -> list[Run]:
        """Run the recurrences of a job.

        In a recurrence, the master launches the script until a run reaches the target, at most 20 times. The cost of a
        recurrence is the sum over its runs. A run's cost is bounded by β times the cost of the cheapest recurrence.

        Args:
            job: The job.
            num_recurrence: Number of recurrences, including those before a resume.
            batch_sizes: Sizes to choose from.
            beta_knob: β. None: no bound.
            eta_knob: η of the cost.
            logdir: Log directory. None: `build_logdir` makes one.
            resume_from: Log directory of a master that has ended early.

        Returns:
            All runs, including those before a resume.

        Raises:
            ZeusBSOTrainFailError: The default batch size missed the target in the first recurrence, or all tries of a
                recurrence failed. In the latter case, a resume continues with the next recurrence.
            ZeusBSOConfigError: The arguments contradict each other or the resumed directory.
            ZeusBSORuntimeError: The server that chooses batch sizes fails.
        """
        directory = Path(
            resume_from or logdir or self.build_logdir(job, num_recurrence, eta_knob, beta_knob)
        ).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        with lock_file(directory / _LOCK_FILE) as lock:
            if not try_lock(lock):
                raise ZeusBSOConfigError(f"another master works in {directory}: end it first")
            fresh = MasterState(
                job=job.name,
                batch_sizes=tuple(sorted(batch_sizes)),
                beta_knob=beta_knob,
                eta_knob=eta_knob,
                target_metric=job.target_metric,
                default_bs=job.default_bs,
                seed=self._seed,
                gpus=self._gpus or energy.auto().gpus(),
            )
            if resume_from is not None:
                state = _resumed(MasterState.read(directory), fresh, directory)
            elif (directory / HISTORY_FILE).exists():
                raise ZeusBSOConfigError(
                    f"{directory} holds another master's history: resume it, or choose another one"
                )
            else:
                state = fresh
            recurring = _Recurring(self, job, directory, state)
            try:
                recurring.begin()
                while recurring.state.next_run.recurrence <= num_recurrence:
                    recurring.step()
            finally:
                self._optimizer.interrupt()
            return list(recurring.state.history)

    def launch(self, job: Job, run: PlannedRun, logdir: Path, eta_knob: float, *, resumes: bool = False) -> TrainResult:
        """Launch the script once, or if it `resumes`, wait for the run of a killed master, and return its result.

        The script's output goes to ``{logdir}/{job id}.train.log``. The script writes its result to
        ``{logdir}/{job id}+bs{batch size}.train.json``.

        Raises:
            FailedTryError: The script left no result.
            ZeusBSOConfigError: The script cannot be started.
        """
        environ = {
            environment.LOG_DIR.name: str(logdir),
            environment.JOB_ID.name: run.job_id,
            environment.COST_THRESHOLD_J.name: str(run.cost_ub),
            environment.ETA_KNOB.name: str(eta_knob),
            environment.TARGET_METRIC.name: str(job.target_metric),
            environment.PROFILE_STEPS.name: self._profile_params,
        }
        launch = Launch(
            command=job.command_line(run.bs, run.learning_rate, run.seed),
            workdir=None if job.workdir is None else Path(job.workdir),
            environ=environ,
            log=logdir / f"{run.job_id}.train.log",
        )
        path = result_path(logdir, run.job_id, run.bs)
        if resumes:
            wait_for_end(launch)
            # If the run ended with its master, without a result, launch it again below.
            with contextlib.suppress(ZeusBSOConfigError):
                result = TrainResult.read(path)
                if result is not None:
                    return result
        path.unlink(missing_ok=True)
        began = time.monotonic()
        status = execute(launch)
        time_s = max(time.monotonic() - began, LEAST_TIME_S)
        try:
            result = TrainResult.read(path)
        except ZeusBSOConfigError as error:
            raise FailedTryError(str(error), outcome="failed", time_s=time_s) from None
        if result is None:
            outcome, reason = why_failed(status, launch.log)
            raise FailedTryError(reason, outcome=outcome, time_s=time_s)
        return result


class _Recurring:
    """One call of `ZeusMaster.run`. Each step saves the state before it acts on the state."""

    def __init__(self, master: ZeusMaster, job: Job, directory: Path, state: MasterState) -> None:
        self._master = master
        self._optimizer = master._optimizer
        self._job = job
        self._directory = directory
        self._may_be_running = state.running is not None
        self.state = state

    def begin(self) -> None:
        """Restore the optimizer's state."""
        state, sizes = self.state, list(self.state.batch_sizes)
        if state.optimizer is not None:
            self._optimizer.load_state_dict(state.optimizer)
        self._optimizer.register_job(self._job, sizes, eta_knob=state.eta_knob, beta_knob=state.beta_knob)
        if state.history:
            print(f"resumed after {len(state.history)} runs", flush=True)
        self._keep()
        self._observe()

    def step(self) -> None:
        """Do one run, from choosing its batch size to the optimizer's observation."""
        _check_default(self.state, self._job)
        planned = self.state.running or self._planned()
        self._keep(running=planned)
        print(begun_in_words(planned), flush=True)
        run = self._play(planned)
        self._keep(running=None, history=(*self.state.history, run))
        print(ended_in_words(run), flush=True)
        self._observe()
        _check_last(self.state, self._job)

    def _planned(self) -> PlannedRun:
        batch_size = self._optimizer.predict(self._job)
        upcoming = self.state.next_run
        return PlannedRun(
            **asdict(upcoming),
            job_id=f"rec{upcoming.recurrence:02d}+try{upcoming.tries:02d}",
            bs=batch_size,
            learning_rate=self._job.learning_rate(batch_size),
        )

    def _play(self, planned: PlannedRun) -> Run:
        resumes, self._may_be_running = self._may_be_running, False
        max_power_w, eta = self.state.gpus.max_power, self.state.eta_knob
        try:
            result = self._master.launch(self._job, planned, self._directory, eta, resumes=resumes)
        except FailedTryError as failure:
            # The upper bound of the energy, so that a failed run cannot tighten the cost bound.
            energy_j = max_power_w * failure.time_s
            known: dict[str, Any] = {"energy": energy_j, "energy_source": "maximum power × time", "reached": False}
            known |= {"time": failure.time_s, "outcome": failure.outcome, "reason": str(failure)}
        else:
            outcome, reason = _outcome_of(result, self._job)
            known = result.model_dump(include={"energy", "time", "reached", "end_epoch", "metric", "energy_source"})
            known |= {"pl": result.power_limit_w, "outcome": outcome, "reason": reason}
        cost_j = cost(energy_j=known["energy"], time_s=known["time"], max_power_w=max_power_w, eta=eta)
        return Run(**planned.model_dump(), **known, cost=cost_j)

    def _observe(self) -> None:
        for run in self.state.history[self.state.observed :]:
            self._optimizer.observe_run(self._job, run)
            self._keep(observed=self.state.observed + 1)

    def _keep(self, **changes: object) -> None:
        self.state = self.state.model_copy(update={**changes, "optimizer": self._optimizer.state_dict()})
        self.state.write(self._directory)


def _outcome_of(result: TrainResult, job: Job) -> tuple[Literal["completed", "early_stopped", "exhausted"], str]:
    if result.reached:
        return "completed", f"target reached after {result.end_epoch} epochs"
    if result.end_epoch < job.max_epochs:
        return "early_stopped", f"stopped after {result.end_epoch} epochs: too costly"
    return "exhausted", f"{result.end_epoch} epochs without the target"


def _check_default(state: MasterState, job: Job) -> None:
    """Raise an error if the default size missed the target in the first recurrence."""
    for run in state.history:
        if run.recurrence == 1 and run.bs == state.default_bs and run.was_measured and not run.reached:
            raise ZeusBSOTrainFailError(
                f"job {job.name}: the default batch size {run.bs} did not reach the target metric "
                f"{job.target_metric:g} in {run.end_epoch} epochs, on the first recurrence ({run.job_id}): without "
                "a default to compare with, start again with a lower target_metric, more max_epochs or another "
                "default_bs"
            )


def _check_last(state: MasterState, job: Job) -> None:
    """Raise an error if the last recurrence has failed all its tries."""
    last = state.history[-1]
    if last.tries == MAX_TRIES and not last.reached:
        raise ZeusBSOTrainFailError(
            f"job {job.name}: recurrence {last.recurrence} is given up, as none of its {MAX_TRIES} runs reached the "
            f"target; the last run: {last.reason}. Its logs say more. When the cause is mended, resume: the next "
            "recurrence follows"
        )


def _resumed(kept: MasterState, now: MasterState, directory: Path) -> MasterState:
    for name in ("job", "batch_sizes", "beta_knob", "eta_knob", "target_metric", "default_bs", "seed"):
        before, after = getattr(kept, name), getattr(now, name)
        if before != after:
            raise ZeusBSOConfigError(
                f"{directory} was begun with {name} {before}, not {after}: its costs cannot be compared with further "
                "runs. Change it back, or start a new job"
            )
    return kept


_LOG_END_BYTES = 8192
_LAST_LINES = 5
_MEMORY_ERROR = re.compile(r"\b(MemoryError|OutOfMemoryError|std::bad_alloc)\b")
_SHELL_SIGNAL_BASE = 128


class FailedTryError(ZeusBSOTrainFailError):
    """A run of a script left no result.

    Attributes:
        outcome: ``infeasible`` if the run was out of memory, else ``failed``.
        time_s: Duration of the run in seconds.
    """

    def __init__(self, reason: str, *, outcome: Literal["failed", "infeasible"], time_s: float) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.time_s = time_s


def why_failed(status: int, log: Path) -> tuple[Literal["failed", "infeasible"], str]:
    """Return the outcome of a run without a result, and the reason in words.

    The run was out of memory if the last lines of its log say so. A status of −n means that signal n ended the run.
    """
    lines = _last_lines(log)
    said = lines[-1] if lines else "it printed nothing"
    # A shell adds 128 to the signal that ended its command.
    ended_by = -status if status < 0 else status - _SHELL_SIGNAL_BASE
    number = ended_by if ended_by in set(signal.Signals) else None
    if status != 0:
        for line in reversed(lines):
            if _MEMORY_ERROR.search(line) or outcome_of(RuntimeError(line)) is TrialState.INFEASIBLE:
                return "infeasible", _fitting(f"out of memory: {line}")
    if number == signal.SIGKILL:
        return "failed", _fitting(f"killed by SIGKILL, as by someone or by a memory limit; its last words: {said}")
    if number is not None:
        return "failed", _fitting(f"ended by {signal.Signals(number).name}; its last words: {said}")
    if status:
        return "failed", _fitting(f"exit status {status}; its last words: {said}")
    return "failed", "it ended without an error and wrote no result: the script must write its train.json"


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_END_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _fitting(text: str) -> str:
    return text.replace("\x00", "")[:MAX_DETAIL_LENGTH]
