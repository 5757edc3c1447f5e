"""Lightness of the training side: its imports and its installed packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

FRAMEWORKS = ["torch", "lightning", "pytorch_lightning", "transformers"]
HEAVY = [*FRAMEWORKS, "litestar", "sqlalchemy", "bso_server", "numpy", "pynvml"]
# Packages of other training images must not be added or changed: three that we need, and their dependencies.
OURS = {"zeus-plugins", "httpx", "pydantic", "nvidia-ml-py"}
THEIRS = {
    *("anyio", "certifi", "h11", "httpcore", "idna", "sniffio"),
    *("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"),
}
LONG_S = 600.0


def test_training_side_loads_no_framework_and_no_server() -> None:
    parts = [f"zeus_plugins.{part}" for part in ("training.session", "client.http", "cli", "master", "testing")]
    program = f"import sys, {', '.join(parts)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel of this checkout, without extras, and its dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", ROOT]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=LONG_S)
    if done.returncode != 0:
        causes = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        reason = f"nothing can be installed: {causes[-1]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return python


def outside(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_installation_contains_only_required_packages(bare: Path, tmp_path: Path) -> None:
    listed = outside(bare, "-m", "pip", "--disable-pip-version-check", "list", "--format", "json", folder=tmp_path)
    installed = {re.sub(r"[-_.]+", "-", each["name"]).lower() for each in json.loads(listed.stdout)}
    installed -= {"pip", "setuptools"}
    assert installed >= OURS
    assert installed <= OURS | THEIRS


@pytest.mark.slow
def test_bare_installation_works(bare: Path, tmp_path: Path) -> None:
    program = f"import {', '.join(f'zeus_plugins.{part}' for part in ('energy', 'optimizer', 'cli.doctor'))}"
    done = outside(bare, "-W", "error", "-c", f"{program}; print(zeus_plugins.__file__)", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


@pytest.mark.slow
def test_commands_work_in_the_bare_installation(bare: Path, tmp_path: Path) -> None:
    command = bare.parent / "zeus-plugins"
    told = json.loads(outside(command, "doctor", "--json", folder=tmp_path).stdout)
    (versions,) = (finding["details"] for finding in told["findings"] if finding["check"] == "versions")
    assert OURS - {"httpx", "pydantic"} <= set(versions)
    assert "torch" not in versions
    measured = outside(command, "energy", "--json", "--", "sh", "-c", "exit 3", folder=tmp_path)
    assert measured.returncode == 3
    assert json.loads(measured.stderr.splitlines()[-1])["exit_status"] == 3


@pytest.mark.slow
def test_missing_package_is_named_with_a_remedy(bare: Path, tmp_path: Path) -> None:
    done = outside(bare.parent / "zeus-plugins", "demo", folder=tmp_path)
    assert done.returncode == 1
    assert "is not installed: pip install 'zeus-plugins[demo]'" in done.stderr
