"""``zeus-plugins energy`` with real commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml, FakeNvmlError
from zeus_plugins import energy
from zeus_plugins.cli import energy as energy_command
from zeus_plugins.cli import main

# The program, on any machine as on a machine without counters for which 100 W are stated.
PROGRAM = """
import sys
from functools import partial
from zeus_plugins import energy
from zeus_plugins.cli import main
energy.auto = partial(energy.auto, 100.0, probes=())
sys.exit(main())
"""
ENERGY = [sys.executable, "-c", PROGRAM, "energy"]
SOURCE = energy.EstimateMonitor(100.0).source
LONG_S = 60.0


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command find no counter, and 100 W stated."""
    monkeypatch.setattr(energy, "auto", partial(energy.auto, 100.0, probes=()))


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its status and its standard error, as nothing else is written."""
    status = main(["energy", *arguments])
    output, errors = capfd.readouterr()
    assert output == ""
    return status, errors


def test_time_and_energy_are_reported_beside_the_output_of_the_command() -> None:
    command = ["sh", "-c", "cat; echo error >&2; sleep 0.3; exit 3"]
    done = subprocess.run(
        [*ENERGY, "--json", "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
        input="input",
    )
    assert (done.returncode, done.stdout) == (3, "input")
    warning, first, last = done.stderr.splitlines()
    assert warning.startswith("energy is estimated as 100 W × CPU time / cores, not measured")
    assert first == "error"
    told = json.loads(last)
    assert told["time_s"] >= 0.3
    energy_j = told.pop("energy_j")
    assert energy_j > 0
    assert told.pop("mean_power_w") == pytest.approx(energy_j / told.pop("time_s"))
    assert told.pop("gpu_model")
    assert told == {
        "command": command,
        "exit_status": 3,
        "energy_source": SOURCE,
        "max_power": 100.0,
        "number_of_gpus": 1,
    }


@pytest.mark.usefixtures("stated")
def test_text_output_is_a_single_line(capfd: pytest.CaptureFixture[str]) -> None:
    status, errors = run(capfd, "sh", "-c", "exit 0")
    assert status == 0
    line = r"zeus-plugins energy: [\d.]+ s, [\d.]+ J, [\d.]+ W on average \(" + re.escape(SOURCE) + r"\)\n"
    assert re.fullmatch(line, errors), errors


@pytest.mark.usefixtures("stated")
def test_report_can_be_written_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "--json", "--output", str(tmp_path / "told.json"), "--", "true") == (0, "")
    assert json.loads((tmp_path / "told.json").read_text())["exit_status"] == 0


@pytest.mark.usefixtures("stated")
def test_unwritable_file_loses_neither_figures_nor_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, errors = run(capfd, "--output", str(tmp_path / "absent" / "told"), "--", "sh", "-c", "exit 4")
    assert status == 4
    assert "No such file or directory" in errors
    assert "W on average" in errors


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["nonesuch"], 127, "nonesuch: No such file or directory"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL, "W on average"),
    ],
)
def test_abnormal_end_of_the_command_sets_the_exit_status(
    command: list[str], status: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found, errors = run(capfd, "--", *command)
    assert found == status
    assert says in errors


def test_command_is_not_run_without_a_working_monitor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpus = [FakeGpu(), FakeGpu(name="NVIDIA A100", uuid="GPU-1")]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    status, errors = run(capfd, "--", "touch", str(tmp_path / "touched"))
    assert status == 125
    assert "several models" in errors
    assert not (tmp_path / "touched").exists()


def test_missing_command_shows_the_usage(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["energy", "--json"])
    assert "zeus-plugins energy -- COMMAND" in capfd.readouterr().err


# Prints a line, waits for a signal, and ends with 10 plus its number.
WAITS = """
import signal, sys, time
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: sys.exit(10 + number))
print("waiting", flush=True)
while True:
    time.sleep(0.05)  # A signal that comes just before one long sleep would be seen only after it.
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_forwarded_to_the_command(number: signal.Signals) -> None:
    with subprocess.Popen(
        [*ENERGY, "--", sys.executable, "-c", WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 10 + number
    assert "W on average" in errors


# Counts interrupts until SIGUSR1 arrives; outside the process group, the command gets none from the terminal.
COUNTS = """
import os, signal, sys, time
seen = []
def tell(number, frame):
    print("interrupts:", len(seen), flush=True)
    sys.exit()
signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
signal.signal(signal.SIGUSR1, tell)
if sys.argv[1] == "apart":
    os.setpgid(0, 0)
print("waiting", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
# the child executes another program immediately
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("place", "interrupts"), [("beside", 1), ("apart", 0)])
def test_ctrl_c_of_the_terminal_is_not_forwarded_twice(place: str, interrupts: int) -> None:
    import pty

    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [*ENERGY, "--", sys.executable, "-c", COUNTS, place])  # noqa: S606 - no shell
    seen = b""

    def read_until(end: bytes) -> None:
        nonlocal seen
        while end not in seen:
            seen += os.read(terminal, 1024)

    read_until(b"waiting")
    os.write(terminal, b"\x03")
    read_until(b"^C")  # The terminal echoes ^C after sending the signal.
    os.kill(child, signal.SIGUSR1)
    read_until(b"W on average")
    os.waitpid(child, 0)
    os.close(terminal)
    assert f"interrupts: {interrupts}\r\n".encode() in seen


@pytest.mark.parametrize(("counter_mj", "source"), [(7_000_000, "nvml"), (None, "nvml power, integrated")])
def test_best_monitor_of_the_machine_measures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], counter_mj: int | None, source: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(counter_mj=counter_mj, power_mw=50_000)]))
    status, errors = run(capfd, "--json", "--", "true")
    assert (status, json.loads(errors)["energy_source"]) == (0, source)


@pytest.mark.parametrize(
    ("removed", "instead"),
    [
        (["--monitor", "rapl"], "leave it out, and the machine's best monitor measures. CUDA_VISIBLE_DEVICES= selects"),
        (["--monitor=amdsmi"], "Zeus reads AMD GPUs (python -m zeus.monitor energy)"),
        (["--power-w", "65"], "set ZEUS_ESTIMATED_POWER_W"),
        (["--scope", "node"], "the monitor's devices count; CUDA_VISIBLE_DEVICES= selects CPU and memory"),
    ],
)
def test_removed_option_is_refused_with_the_replacement(
    capfd: pytest.CaptureFixture[str], removed: list[str], instead: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["energy", *removed, "--", "echo", "run"])
    output, errors = capfd.readouterr()
    assert output == ""
    assert f"{removed[0].partition('=')[0]} was removed: " in errors
    assert instead in errors


def test_command_is_measured_on_a_gpu_without_a_limit_if_its_watts_are_stated(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(max_power_mw=None, limit_mw=None)]))
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", "80")
    assert main(["energy", "--json", "--", "true"]) == 0
    assert json.loads(capfd.readouterr().err)["max_power"] == 80.0


class Losing(FakeNvml):
    """A driver with a counter that rises by a joule with each reading, until the file `lost` of its folder exists.

    It makes the file `read` at its tenth reading, and the file `missed` when a reading has failed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.readings = folder, 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:  # noqa: N802 - NVML's own name
        if (self.folder / "lost").exists():
            (self.folder / "missed").touch()
            raise FakeNvmlError("GPU is lost")
        self.readings += 1
        if self.readings == 10:
            (self.folder / "read").touch()
        handle.spend(1000)
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


WAIT = "for _ in $(seq 1000); do [ -e {0} ] && break; sleep 0.02; done; "


@pytest.mark.parametrize(("end", "status"), [("", 125), ("exit 5", 5)], ids=["lost", "failed"])
def test_loss_of_a_gpu_is_bridged_and_the_first_part_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, end: str, status: int
) -> None:
    monkeypatch.setattr(energy_command, "READ_INTERVAL_S", 0.02)
    monkeypatch.setitem(sys.modules, "pynvml", Losing(tmp_path))
    command = f"cd {tmp_path}; {WAIT.format('read')} touch lost; {WAIT.format('missed')} {end}"
    output = tmp_path / "told.json"
    assert main(["energy", "--json", "--output", str(output), "--", "sh", "-c", command]) == status
    told = json.loads(output.read_text())
    assert told["exit_status"] == (0 if status == 125 else status)
    assert told["energy_source"].startswith("nvml + estimate: ")
    assert told["energy_source"].endswith(" W, as it cannot be measured")
    assert told["energy_j"] > 4.0
    assert capfd.readouterr().out == ""


def test_foreign_process_that_computes_during_a_command_stands_in_the_source(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Shared(Losing):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802
            handle.pids = [4_000_001] if self.readings > 9 and not (self.folder / "gone").exists() else []
            return super().nvmlDeviceGetComputeRunningProcesses(handle)

    monkeypatch.setattr(energy_command, "READ_INTERVAL_S", 0.02)
    monkeypatch.setitem(sys.modules, "pynvml", Shared(tmp_path))
    command = f"cd {tmp_path}; {WAIT.format('read')} sleep 0.2; touch gone"
    assert main(["energy", "--json", "--", "sh", "-c", command]) == 0
    assert "nvml, shared with other processes" in json.loads(capfd.readouterr().err)["energy_source"].split(" + ")
