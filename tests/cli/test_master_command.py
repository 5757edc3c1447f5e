"""``zeus-plugins master run``: killing, interrupting and resuming."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.masters import ROOT, TRAINING
from zeus_plugins.client import client_from_environment
from zeus_plugins.master import MasterState
from zeus_plugins.protocol import JobView, TrialState

LONG_S = 120.0
# Modules that a master imports.
MASTER = (
    "zeus_plugins.cli",
    "zeus_plugins.master.optimizers",
    "zeus_plugins.client.local",
    "alembic.command",
)

TOML = """
[job]
name = "tiny"
dataset = "digits"
network = "softmax"
optimizer = "sgd"
target_metric = 0.8
max_epochs = 20
default_bs = 64
default_lr = 0.5
command = "{command} --ends {ends}"
workdir = "{workdir}"

[master]
batch_sizes = [32, 64, 128]
beta_knob = 4.0

[optimizer]
# Plays the sizes in an order that tests know.
options = {{ policy = "zeus", num_pruning_rounds = 1, mab_seed = 1 }}

[gpus]
max_power = 100
number_of_gpus = 1
gpu_model = "none"
"""


class Bench:
    """The command in a separate directory."""

    def __init__(self, directory: Path, *ends: str) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        ends_file = directory / "ends"
        ends_file.write_text("\n".join(ends or ("train",)))
        toml = TOML.format(command=TRAINING, ends=ends_file, workdir=ROOT)
        (directory / "job.toml").write_text(toml)
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ZEUS_BSO_DATABASE_URL": f"sqlite:///{directory / 'bso.sqlite3'}",
        }
        self.environ.pop("ZEUS_SERVER_URL", None)

    def start(self, recurrences: int, *arguments: str) -> warm.Process:
        self.output = self.directory / "output"
        self.output.unlink(missing_ok=True)
        command = ["zeus_plugins", "master", "run", "job.toml", "--log-base", str(self.logs)]
        command += ["--recurrences", str(recurrences), *arguments]
        return warm.start(*command, modules=MASTER, output=self.output, environ=self.environ, folder=self.directory)

    def end_of(self, process: warm.Process) -> tuple[int, str]:
        """Return the exit status and the output of a process."""
        return process.wait(LONG_S), self.output.read_text()

    def run(self, recurrences: int, *arguments: str) -> str:
        status, output = self.end_of(self.start(recurrences, *arguments))
        assert status == 0, output
        return output

    def wait_for_script(self, process: warm.Process) -> int:
        """Wait until a script waits for `go`; return its pid."""
        waits = self.logs / "go.waits"
        while not (waits.exists() and waits.read_text()):
            assert process.poll() is None, self.output.read_text()
            time.sleep(0.02)
        pid = int(waits.read_text())
        waits.unlink()
        return pid

    @property
    def state(self) -> MasterState:
        # A master killed before its first run leaves an empty directory.
        (directory,) = {path.parent for path in self.logs.glob("*/history.json")}
        return MasterState.read(directory)

    @property
    def job(self) -> JobView:
        with client_from_environment(f"embedded://{self.directory / 'bso.sqlite3'}") as client:
            return client.show_job("tiny")

    @property
    def trial_states(self) -> list[TrialState]:
        return [trial.state for trial in self.job.trials]

    @property
    def begun(self) -> list[str]:
        """Job ids of the runs that scripts have begun."""
        begun = self.logs / "begun.txt"
        return [line.split()[0] for line in begun.read_text().splitlines()] if begun.exists() else []


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_command_finds_the_size_shown_by_the_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    output = bench.run(4)
    assert len(bench.state.history) == 4
    assert bench.job.savings.in_words in output
    assert "rec04+try01: batch size" in output


def test_resumed_master_uses_the_result_left_by_the_script(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "train", "wait", "train")
    process = bench.start(3)
    bench.wait_for_script(process)
    process.kill()
    process.wait()
    (bench.logs / "go").touch()
    output = bench.run(3, "--resume")
    assert [run.job_id for run in bench.state.history] == ["rec01+try01", "rec02+try01", "rec03+try01"]
    assert bench.begun == ["rec01+try01", "rec02+try01", "rec03+try01"]
    assert "resumed after 1 runs" in output
    assert [run.seed for run in bench.state.history] == [123456, 123457, 123458]


@pytest.mark.slow
def test_repeatedly_killed_master_repeats_and_loses_no_run(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Bench(tmp_path / "undisturbed", *["train", "kill", "train", "memory", "train"])
    undisturbed.run(3)
    (tmp_path / "killed").mkdir()
    bench = Bench(tmp_path / "killed", *["train", "kill", "train", "memory", "train"])
    statuses = []
    for seconds_into_run in (0, 0.03, 0.1, 0.3):
        begun = len(bench.begun)
        process = bench.start(3, *(["--resume"] if list(bench.logs.glob("*/history.json")) else []))
        while len(bench.begun) == begun and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds_into_run)
        process.kill()
        statuses.append(process.wait())
    assert -signal.SIGKILL in statuses
    bench.run(3, "--resume")
    history = [(run.job_id, run.bs, run.seed, run.reached) for run in bench.state.history]
    assert history == [(run.job_id, run.bs, run.seed, run.reached) for run in undisturbed.state.history]
    # A run is repeated only if no master has seen its failure.
    assert list(dict.fromkeys(bench.begun)) == undisturbed.begun
    measured = [run.job_id for run in bench.state.history if run.was_measured]
    assert all(bench.begun.count(job_id) == 1 for job_id in measured)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow, id="SIGTERM"),
    ],
)
def test_interrupted_master_ends_the_script_first_and_can_be_resumed(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    bench = Bench(tmp_path, "train", "wait", "train")
    process = bench.start(2)
    script = bench.wait_for_script(process)
    process.send_signal(number)
    assert bench.end_of(process)[0] == status, bench.output.read_text()
    assert is_gone(script)
    assert bench.trial_states[-1] is TrialState.SUSPENDED
    assert "KeyboardInterrupt" in (next(bench.logs.glob("*/rec02+try01.train.log"))).read_text()
    (bench.logs / "go").touch()
    bench.run(2, "--resume")
    assert [run.job_id for run in bench.state.history] == ["rec01+try01", "rec02+try01"]
    assert bench.trial_states == [TrialState.COMPLETED] * 2


def test_second_ctrl_c_kills_an_unresponsive_script(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "stubborn")
    process = bench.start(1)
    script = bench.wait_for_script(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)  # Leave the master time to interrupt the script, which ignores the signal.
    assert not is_gone(script)
    process.send_signal(signal.SIGINT)
    assert bench.end_of(process)[0] == 130, bench.output.read_text()
    assert is_gone(script)


@pytest.mark.slow
def test_resumed_master_waits_for_the_script_and_ctrl_c_ends_only_the_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "wait", "train")
    process = bench.start(1)
    script = bench.wait_for_script(process)
    process.kill()
    process.wait()
    resumed = bench.start(1, "--resume")
    while not (bench.output.exists() and "rec01+try01" in bench.output.read_text()):
        assert resumed.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)  # The script does not end by itself.
    assert resumed.poll() is None
    assert not is_gone(script)
    resumed.send_signal(signal.SIGINT)
    resumed.wait(LONG_S)
    assert not is_gone(script)
    (bench.logs / "go").touch()
    bench.run(1, "--resume")
    assert bench.begun == ["rec01+try01"]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("max_epochs = 20", "max_epochs = 0", "job.max_epochs"),
        ("[gpus]", "[gups]", "gups: Extra inputs"),
        ("default_lr = 0.5", "", "job.default_lr: Field required"),
        ("[job]", "[job", "is no TOML"),
        ("default_bs = 64", "default_bs = 65", "65 is not one of batch_sizes"),
        ("--lr", "{width}", "{width}, which has no value"),
        ("num_pruning_rounds", "pruning", "pruning"),
        ("[master]", "[master]\nobserver_mode = true", "master.observer_mode: Extra inputs"),
    ],
)
def test_invalid_file_is_reported_in_a_single_line(tmp_path: Path, before: str, after: str, says: str) -> None:
    bench = Bench(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(path.read_text().replace(before, after))
    status, output = bench.end_of(bench.start(1))
    assert status == 1
    (line,) = [line for line in output.splitlines() if not line.startswith("logs: ")]
    assert says in line
