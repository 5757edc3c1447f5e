"""Report of a job from its client, as shown in notebooks: from a remote server and from the embedded server."""

from __future__ import annotations

import re
import sys
import uuid
from html import unescape
from pathlib import Path

import httpx
import pytest

from bso_server.ui import html
from tests.support.dashboard_pages import Page
from tests.support.servers import ServerProcess
from zeus_plugins.client import BsoClient, client_from_environment
from zeus_plugins.client.local import LocalServer
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus_plugins.protocol import GpuConfig, JobSpec, JobSpecFromClient

GPUS = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="NVIDIA <b>A100</b>")


@pytest.fixture(params=["http", "embedded"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> BsoClient | LocalServer:
    if request.param == "http":
        server: ServerProcess = request.getfixturevalue("shared_server")
        return BsoClient(server.url)
    return LocalServer(f"embedded://{tmp_path / 'bso.sqlite3'}")


def test_notebook_shows_a_job_in_a_sandboxed_frame(client: BsoClient | LocalServer, tmp_path: Path) -> None:
    spec = JobSpec(
        job_id=f"job-{uuid.uuid4().hex}", job_id_prefix="job", batch_sizes=(8, 16), default_batch_size=8, max_epochs=3
    )
    with client:
        job_id = client.register(JobSpecFromClient.of(spec, GPUS)).job_id
        report = client.job_report(job_id)
        frame = re.fullmatch(r'<iframe [^<>]*srcdoc="([^"<>]*)" sandbox="" [^<>]*></iframe>', report._repr_html_())
        assert frame is not None
        assert unescape(frame[1]) == report.html
        page = Page(report.html)
        assert job_id in page.text
        assert "NVIDIA <b>A100</b>" in page.text
        assert repr(report) == f"JobReport(job_id='{job_id}')"
        assert report.save(tmp_path / "report.html").read_text("utf-8") == report.html
        with pytest.raises(ZeusBSORuntimeError) as refused:
            client.job_report("unknown")
        assert refused.value.status == 404


def test_foreign_server_makes_no_reports() -> None:
    zeus = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    with BsoClient("http://zeus.example", transport=zeus) as client, pytest.raises(ZeusBSORuntimeError) as refused:
        client.job_report("job")
    assert refused.value.is_foreign


def test_report_without_jinja2_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html.templates.cache_clear()
    with client_from_environment(f"embedded://{tmp_path / 'bso.sqlite3'}") as client:
        spec = JobSpec(job_id="job", job_id_prefix="job", batch_sizes=(8,), default_batch_size=8, max_epochs=3)
        client.register(JobSpecFromClient.of(spec, GPUS))
        assert isinstance(client, LocalServer)
        with pytest.raises(ZeusBSOConfigError, match=r"needs jinja2, which .*pip install 'zeus-plugins\[server\]'"):
            client.job_report("job")
