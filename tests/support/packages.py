"""Packages installed for a test: modules and their metadata in a folder on the path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from bso_server.core.policy import GROUP, _found


class Packages:
    """Packages that provide policies to this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.syspath_prepend(folder)

    def install(self, package: str, policy: str, source: str, value: str = "POLICY") -> None:
        """Install or update a package with a single module of the same name that contains a policy."""
        (self._folder / f"{package}.py").write_text(source)
        metadata = self._folder / f"{package}-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{policy} = {package}:{value}\n")
        self._start_anew(package)

    def uninstall(self, package: str) -> None:
        """Remove a package."""
        (self._folder / f"{package}.py").unlink()
        for file in (metadata := self._folder / f"{package}-1.0.dist-info").iterdir():
            file.unlink()
        metadata.rmdir()
        self._start_anew(package)

    def _start_anew(self, package: str) -> None:
        """Remove all traces of the package from this process, as if it had just started."""
        sys.modules.pop(package, None)
        cached = self._folder / "__pycache__"
        for file in cached.glob(f"{package}.*.pyc"):
            file.unlink()
        importlib.invalidate_caches()
        _found.cache_clear()
