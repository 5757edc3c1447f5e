"""The client that an environment asks for."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from zeus_plugins.client import client_from_environment
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOServerUnreachableError


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_of_the_environment_that_cannot_be(text: str) -> None:
    environ = {"ZEUS_SERVER_URL": "http://bso", "ZEUS_BSO_TIMEOUT_S": text}
    with pytest.raises(ZeusBSOConfigError, match=f"ZEUS_BSO_TIMEOUT_S is '{text}'"):
        client_from_environment(environ=environ)


def test_a_timeout_of_the_environment() -> None:
    environ = {"ZEUS_SERVER_URL": "http://bso", "ZEUS_BSO_TIMEOUT_S": "2.5"}
    assert client_from_environment(environ=environ).timeout_s == 2.5
    assert client_from_environment(environ=environ, timeout_s=4).timeout_s == 4
    assert client_from_environment(environ={"ZEUS_SERVER_URL": "http://bso"}).timeout_s == 10


def test_arguments_win_over_the_environment() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    here = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def request_with(*arguments: str, **environ: str) -> bytes:
        requests: list[bytes] = []

        def hear() -> None:
            connection, _ = listener.accept()
            requests.append(connection.recv(4096))
            connection.close()

        hearing = threading.Thread(target=hear)
        hearing.start()
        with client_from_environment(*arguments, environ=environ).with_retries(NO_RETRIES) as client:
            assert client.server_url == here
            with pytest.raises(ZeusBSOServerUnreachableError):
                client.request_trial("mnist-1")
        hearing.join()
        return requests[0]

    environ = {"ZEUS_SERVER_URL": here, "ZEUS_BSO_TOKEN": "of-environment"}
    assert b"Bearer of-environment" in request_with(**environ)
    environ["ZEUS_SERVER_URL"] = "http://environment"
    assert b"Bearer of-argument" in request_with(here, "of-argument", **environ)
    listener.close()


@pytest.mark.parametrize("environ", [{}, {"ZEUS_SERVER_URL": ""}])
def test_without_a_server_url_the_server_in_this_process_is_meant(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    assert client_from_environment(environ=environ).server_url == f"embedded://{tmp_path / 'bso.sqlite3'}"
