"""Example configurations of nginx and Caddy with TLS and a prefix, run with changed addresses and files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urljoin

import httpx
import pytest

from tests.support import ROOT
from tests.support.dashboard_pages import Page
from tests.support.jobs import job
from tests.support.replay import ReplayMonitor
from tests.support.servers import ServerProcess, free_port, serving, wait_until_up
from tests.support.tokens import bearer, make_token
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement
from zeus_plugins.protocol import GpuConfig

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "deploy"
LIMIT_BYTES = 1024 * 1024


def nginx(folder: Path, server: ServerProcess, port: int) -> list[str]:
    """Return the command of nginx in the foreground."""
    to_server = ("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    return nginx_with("zeus-bso.conf", folder, port, to_server, ("listen 80;", f"listen 127.0.0.1:{free_port()};"))


def nginx_with(name: str, folder: Path, port: int, *changes: tuple[str, str]) -> list[str]:
    site = replaced(
        (DEPLOY / "nginx" / name).read_text(),
        *changes,
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/zeus-bso", str(folder)),
        ("bso.example.com", "localhost"),
    )
    return nginx_in(folder, site)


def nginx_in(folder: Path, site: str) -> list[str]:
    """Return the command of nginx in the foreground with this site and all files in the folder."""
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/proxy.log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; {temporary}\n{site} }}\n"
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", str(folder / "proxy.log")]


def caddy(folder: Path, server: ServerProcess, port: int) -> list[str]:
    """Return the command of a Caddy without managed certificates."""
    site = replaced(
        (DEPLOY / "caddy" / "Caddyfile").read_text(),
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
        ("bso.example.com {", f"https://localhost:{port} {{\n\tbind 127.0.0.1"),
        (
            "# tls /etc/ssl/zeus-bso/fullchain.pem /etc/ssl/zeus-bso/privkey.pem",
            f"tls {folder}/fullchain.pem {folder}/privkey.pem",
        ),
    )
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{site}")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


PROXIES = [
    pytest.param(make, marks=pytest.mark.skipif(shutil.which(make.__name__) is None, reason=f"needs {make.__name__}"))
    for make in (nginx, caddy)
]


@contextmanager
def running(command: list[str], folder: Path, url: str) -> Iterator[None]:
    environ = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    log = folder / "proxy.out"
    with log.open("wb") as output, subprocess.Popen(command, env=environ, stdout=output, stderr=output) as process:
        try:
            wait_until_up(process, url, log)
            yield
        finally:
            process.terminate()


def certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a certificate for this machine and let clients trust it."""
    request_of_one = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", "privkey.pem", "-out", "fullchain.pem", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*request_of_one.split(), *files], cwd=tmp_path, check=True, capture_output=True)
    # Trainings on machines with a private certificate authority do the same.
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "fullchain.pem"))


@pytest.fixture(params=PROXIES)
def proxied(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """URL of a server behind a proxy, below a prefix."""
    certify(tmp_path, monkeypatch)
    make: Callable[[Path, ServerProcess, int], list[str]] = request.param
    port = free_port()
    url = f"https://localhost:{port}/zeus"
    with running(make(tmp_path, server, port), tmp_path, url):
        yield url


def train(url: str, token: str, job_id: str) -> None:
    """Run a training that reaches its target after two epochs."""
    gpus = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="A40")
    spec = JobSpec(job_id=job_id, job_id_prefix="proxied", batch_sizes=(8,), default_batch_size=8, target_metric=0.5)
    monitor = ReplayMonitor([Measurement(1.0, 50.0, "nvml")] * 10, gpus)
    with BsoClient(url, token=token) as client, BatchSizeOptimizer(monitor, url, spec, client=client) as training:
        assert training.get_batch_size() == 8
        training.on_train_begin()
        training.on_evaluate(0.25)
        training.on_evaluate(0.75)
        assert training.training_finished


def test_training_works_through_a_proxy_with_tls_and_a_prefix(proxied: str, server: ServerProcess) -> None:
    token = make_token(server.database_url, "report")
    train(proxied, token, "proxied-1")
    with httpx.Client(base_url=proxied, headers=bearer(token)) as http:
        (trial,) = http.get("/api/jobs/proxied-1").json()["trials"]
        assert (trial["state"], trial["epochs"]) == ("completed", 2)
        assert http.get("/api/jobs").status_code == 200
    assert httpx.get(f"{proxied}/api/jobs").status_code == 401


def test_pages_work_below_the_prefix_with_a_token_as_the_password(proxied: str, server: ServerProcess) -> None:
    token = make_token(server.database_url, "admin")
    asked = httpx.get(f"{proxied}/ui/")
    assert (asked.status_code, asked.headers["www-authenticate"][:6]) == (401, "Basic ")
    with httpx.Client(auth=("any", token)) as http:
        assert http.get(proxied).headers["location"] in {"/zeus/ui/", f"{proxied}/ui/"}
        page = http.get(f"{proxied}/ui/")
        assert page.status_code == 200
        links = {urljoin(str(page.url), link.partition("#")[0]) for link in Page(page.text).links}
        assert len(links) > 3
        documentation = {link for link in links if link.startswith("https://github.com/")}
        assert len(documentation) < len(links) - 3
        for link in links - documentation:
            assert link.startswith(f"{proxied}/ui/")
            assert http.get(link).is_success
        assert http.delete(f"{proxied}/jobs?job_id=x", headers={"Origin": "https://other"}).status_code == 403


def test_client_behind_a_proxy_does_not_count_as_local(proxied: str, server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/api/jobs").is_success
    refused = httpx.get(f"{proxied}/api/jobs")
    assert refused.status_code == 403
    assert "token" in refused.json()["message"]


def test_proxy_applies_the_servers_body_limit(proxied: str, server: ServerProcess) -> None:
    token = bearer(make_token(server.database_url, "admin"))
    with httpx.Client(base_url=proxied, headers={**token, "content-type": "application/json"}) as http:
        assert http.post("/jobs", json=job(job_id="kept-1", job_id_prefix="kept")).status_code == 201
        assert http.post("/jobs", content=b" " * (LIMIT_BYTES + 1)).status_code == 413


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_tokens_select_the_server_of_a_training(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path, monkeypatch)
    (tmp_path / "other").mkdir()
    with serving(f"sqlite:///{tmp_path / 'other' / 'bso.sqlite3'}", tmp_path / "other") as other:
        tokens = [make_token(each.database_url, "report") for each in (server, other)]
        port = free_port()
        command = nginx_with(
            "partitioned.conf",
            tmp_path,
            port,
            ("10.0.0.1:8000", f"127.0.0.1:{server.port}"),
            ("10.0.0.2:8000", f"127.0.0.1:{other.port}"),
            ("zbso_0123abcd_", tokens[1][: len("zbso_0123abcd_")]),
        )
        url = f"https://localhost:{port}/zeus"
        with running(command, tmp_path, url):
            for token, prefix in zip(tokens, "ab", strict=True):
                train(url, token, f"proxied-{prefix}")
            for each, token, prefix in zip((server, other), tokens, "ab", strict=True):
                jobs = httpx.get(f"{each.url}/api/jobs", headers=bearer(token)).json()
                assert [one["job_id"] for one in jobs["jobs"]] == [f"proxied-{prefix}"]
                assert httpx.get(f"{url}/{prefix}/api/jobs", headers=bearer(token)).json() == jobs
                assert httpx.get(f"{url}/{prefix}/ui/", auth=("anybody", token)).status_code == 200


@contextmanager
def authenticating_proxy(server_url: str) -> Iterator[int]:
    """Forward requests as oauth2-proxy does, with the user of a cookie in the header; yield the port."""

    class Forward(BaseHTTPRequestHandler):
        def forward(self) -> None:
            user = re.search("signed_in=([a-z]+)", self.headers.get("Cookie", ""))
            if user is None:
                self.send_error(403)
                return
            sent = [(name, value) for name, value in self.headers.items() if name.lower() != "x-forwarded-user"]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = httpx.request(
                self.command,
                server_url + self.path,
                headers=[*sent, ("X-Forwarded-User", f"{user[1]}@example.com")],
                content=body,
            )
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = forward  # noqa: N815 - http.server prescribes the names

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_single_sign_on_works_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_database: str) -> None:
    """Use the nginx configuration of docs/tokens.md with a substitute for oauth2-proxy."""
    (site,) = re.findall("```nginx\n(.*?)```", (ROOT / "docs/tokens.md").read_text(), re.DOTALL)
    token = make_token(new_database, "report")
    monkeypatch.setenv("ZEUS_BSO_SSO_PROXIES", "127.0.0.1")
    with serving(new_database, tmp_path) as server, authenticating_proxy(server.url) as proxy:
        port = free_port()
        site = replaced(site, ("127.0.0.1:4180", f"127.0.0.1:{proxy}"), ("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
        command = nginx_in(tmp_path, f"server {{ listen 127.0.0.1:{port};\n{site} }}")
        with (
            running(command, tmp_path, f"http://localhost:{port}"),
            httpx.Client(base_url=f"http://localhost:{port}") as http,
        ):
            forged = {"X-Forwarded-User": "ada@example.com"}
            assert http.get("/ui/", headers=forged).status_code == 403
            assert http.get("/api/jobs", headers=forged).status_code == 401
            assert http.get("/ui/", headers=forged | {"Cookie": "signed_in=bob"}).status_code == 200
            train(f"http://localhost:{port}", token, "proxied-1")
