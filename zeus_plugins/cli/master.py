"""``zeus-plugins master run JOB.toml``: run a training script repeatedly, and find its batch size."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_plugins.errors import ZeusBSOConfigError

if TYPE_CHECKING:  # Imported late, because other commands start faster without it.
    from zeus_plugins.master import Job


_NEWEST = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``master``."""
    master = commands.add_parser("master", help="launch a recurring training script, and find its batch size")
    actions = master.add_subparsers(required=True, metavar="ACTION")
    parser = actions.add_parser(
        "run",
        help="run the recurrences of a job file",
        description="Launches the job's script repeatedly, with batch sizes that an optimizer chooses. Logs and "
        "results are in a new directory below --log-base; its history.json contains all runs. --resume continues a "
        "master that was interrupted or killed.",
    )
    parser.add_argument("job", type=Path, metavar="JOB.toml", help="file of the job (docs/master.md)")
    parser.add_argument("--recurrences", type=positive, help="number of recurrences (default: the file's, or 10)")
    parser.add_argument(
        "--log-base",
        type=Path,
        default=Path("zeus-logs"),
        help="directory of all log directories (default %(default)s)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="DIR",
        help="continue in this log directory; without DIR, in the newest log directory of this job",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from zeus_plugins import energy
    from zeus_plugins.client import client_from_environment
    from zeus_plugins.master import MasterState, ServerOptimizer, ZeusMaster
    from zeus_plugins.master.history import conclusion
    from zeus_plugins.master.job import read_config
    from zeus_plugins.signals import raise_at_sigterm

    config, job = read_config(options.job)
    master = config.master
    recurrences = options.recurrences or master.recurrences
    gpus = config.gpus or energy.auto().gpus()
    resume_from = None if options.resume is None else _resumable(options.resume, options.log_base, job)
    raise_at_sigterm()
    with client_from_environment(config.optimizer.server_url) as client:
        optimizer = ServerOptimizer(client, gpus, options=config.optimizer.options)
        zeus_master = ZeusMaster(
            optimizer,
            options.log_base,
            seed=master.seed,
            profile_warmup_iters=master.profile_warmup_iters,
            profile_measure_iters=master.profile_measure_iters,
            gpus=gpus,
        )
        logdir = resume_from or Path(zeus_master.build_logdir(job, recurrences, master.eta_knob, master.beta_knob))
        print(f"logs: {logdir}", flush=True)
        zeus_master.run(
            job,
            recurrences,
            master.batch_sizes,
            master.beta_knob,
            master.eta_knob,
            logdir=logdir,
            resume_from=resume_from,
        )
        savings = optimizer.savings()
    print(conclusion(MasterState.read(logdir).history, savings))
    print(f"All runs: {logdir / 'history.json'}")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _resumable(named: str, log_base: Path, job: Job) -> Path:
    """Return the log directory to resume: `named`, or the newest directory of the job."""
    if named != _NEWEST:
        return Path(named)
    found = [path.parent for path in log_base.glob(f"{job.name}+x*/history.json")]
    if not found:
        raise ZeusBSOConfigError(f"{log_base} holds no log directory of job {job.name}: there is nothing to resume")
    return max(found, key=lambda path: path.name.rpartition("+")[2])
