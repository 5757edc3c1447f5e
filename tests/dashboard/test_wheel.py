"""The files of the dashboard in the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bso_server.ui.html import MEDIA_TYPES
from tests.support import ROOT

pytestmark = pytest.mark.slow

# This limit in bytes holds for the packed sum of all code, templates, style and script of the pages.
MOST = 60 * 1024


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", str(ROOT)]
    done = subprocess.run([*command, "--wheel-dir", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = f"no wheel can be built: {done.stderr}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_has_all_files_of_the_pages_and_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = [each for each in archive.infolist() if each.filename.startswith("bso_server/ui/")]
    assert sum(each.compress_size for each in found) <= MOST
    names = {Path(each.filename).name for each in found}
    assert names >= {*MEDIA_TYPES, *(path.name for path in (ROOT / "bso_server" / "ui" / "templates").iterdir())}
