"""The dashboard as the wheel installs it: the checkout out of sight, a server, a browser."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bso_server.ui.html import MEDIA_TYPES
from tests.support import ROOT, dashboards
from tests.support.servers import free_port, wait_until_up

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


@pytest.fixture(scope="module")
def url(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in an environment with the wheel; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    own = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)
    # The path comes after the environment's own packages. Python reads only paths from a file with this name, so the
    # editable install stays out of sight.
    (own / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    database = f"sqlite:///{folder / 'bso.sqlite3'}"
    dashboards.filled(database, dashboards.fifteen)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "bso_server", "serve", "--port", str(port), "--database-url", database]
    log = folder / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output) as server,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_up(server, address, log)
            where = subprocess.check_output(
                [python, "-c", "import bso_server; print(bso_server.__file__)"], cwd=folder, env=environment, text=True
            )
            assert Path(where.strip()).is_relative_to(own)
            yield address
        finally:
            server.terminate()


def test_pages_are_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = [each for each in archive.infolist() if each.filename.startswith("bso_server/ui/")]
    assert sum(each.compress_size for each in found) <= MOST
    names = {Path(each.filename).name for each in found}
    assert names >= {*MEDIA_TYPES, *(path.name for path in (ROOT / "bso_server" / "ui" / "templates").iterdir())}


def test_wheel_brings_all_files_of_pages(url: str) -> None:
    for name, media_type in MEDIA_TYPES.items():
        answer = httpx.get(f"{url}/ui/static/{name}").raise_for_status()
        assert answer.headers["content-type"].startswith(media_type)
    for address in ("", "jobs/resnet50-cifar100", "jobs/resnet50-cifar100/trials/3"):
        httpx.get(f"{url}/ui/{address}").raise_for_status()
