"""The unit for systemd: read by systemd itself, without starting it; its commands and settings are ours."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bso_server import cli
from bso_server.settings import Settings, variable_of
from tests.support import ROOT

UNIT = ROOT / "deploy" / "systemd" / "zeus-bso.service"
# Of 10, which is a service without any restriction; systemd calls what is below 2 "OK".
MOST_EXPOSED = 1.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def test_its_commands_can_be_run_and_its_settings_exist() -> None:
    text = UNIT.read_text()
    commands = re.findall(r"^ExecStart(?:Pre)?=/opt/zeus-bso/bin/bso-server (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        cli._parser().parse_args(shlex.split(command))
    names = set(re.findall(r"^Environment=(\w+)", text, re.MULTILINE))
    assert names <= {variable_of(name) for name in Settings.model_fields}


@needs_systemd
def test_systemd_knows_each_line_of_it(tmp_path: Path) -> None:
    """Its program is not installed where this runs; another one stands for it."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/zeus-bso/bin/bso-server", "/bin/true"))
    command = ["systemd-analyze", "verify", unit]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


@needs_systemd
def test_it_may_do_little_beside_its_work() -> None:
    command = ["systemd-analyze", "security", "--offline=true", UNIT]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    (exposure,) = re.findall(r"Overall exposure level for zeus-bso.service: ([0-9.]+)", judged.stdout)
    assert float(exposure) <= MOST_EXPOSED, judged.stdout
