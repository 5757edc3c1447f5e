"""Settings and tokens in files, as container platforms provide secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bso_server.cli import main
from bso_server.settings import Settings, secret
from zeus_plugins.client import client_from_environment
from zeus_plugins.environment import access_token
from zeus_plugins.errors import ZeusBSOConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory without settings from elsewhere."""
    for name in [name for name in os.environ if name.startswith("ZEUS_BSO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def held(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_setting_from_a_file_drops_only_trailing_line_feeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("ZEUS_BSO_DB_PASSWORD_FILE", held(folder / "password", " with blanks " + end))
    monkeypatch.setenv("ZEUS_BSO_SERVER_PORT_FILE", held(folder / "port", "1001" + end))
    settings = Settings()
    assert settings.db_password is not None
    assert settings.db_password.get_secret_value() == " with blanks "
    assert settings.server_port == 1001


def test_file_has_the_precedence_of_the_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("SERVER_PORT", "REAP_INTERVAL_S", "READ_TIMEOUT_S", "LOG_LEVEL"), start=1):
        held(folder / name, "ERROR" if name == "LOG_LEVEL" else str(number))
    (folder / ".env").write_text(
        f"ZEUS_BSO_REAP_INTERVAL_S=20\nZEUS_BSO_READ_TIMEOUT_S_FILE=absent\nZEUS_BSO_LOG_LEVEL_FILE={folder}/LOG_LEVEL\n"
    )
    monkeypatch.setenv("ZEUS_BSO_SERVER_PORT_FILE", "absent")
    monkeypatch.setenv("ZEUS_BSO_REAP_INTERVAL_S_FILE", "REAP_INTERVAL_S")
    monkeypatch.setenv("ZEUS_BSO_READ_TIMEOUT_S", "30")
    settings = Settings(server_port=1000)
    assert (settings.server_port, settings.reap_interval_s, settings.read_timeout_s) == (1000, 2, 30)
    assert settings.log_level == "ERROR"


@pytest.mark.parametrize(
    ("content", "other", "said"),
    [
        (None, None, "ZEUS_BSO_DATABASE_URL_FILE: the file cannot be read: .*No such file.*secret"),
        ("\n", None, "ZEUS_BSO_DATABASE_URL_FILE: the file .*secret is empty"),
        (b"\xff\n", None, "ZEUS_BSO_DATABASE_URL_FILE: the file cannot be read: .*utf-8"),
        ("sqlite:///a", "sqlite:///b", "both ZEUS_BSO_DATABASE_URL and ZEUS_BSO_DATABASE_URL_FILE are set: unset one"),
    ],
    ids=["absent", "empty", "no text", "both"],
)
def test_unusable_file_is_reported_with_the_variable(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | bytes | None,
    other: str | None,
    said: str,
) -> None:
    if content is not None:
        (folder / "secret").write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL_FILE", str(folder / "secret"))
    if other is not None:
        monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", other)
    with pytest.raises(ValueError, match=said):
        Settings()
    assert main(["db", "check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bso-server: ")
    with pytest.raises(ZeusBSOConfigError, match=said):  # the embedded server
        client_from_environment("embedded:")


def test_empty_file_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_LOG_LEVEL_FILE", "")
    assert Settings().log_level == "INFO"
    assert secret("TOKEN", {"TOKEN": "abc", "TOKEN_FILE": ""}) == "abc"


@pytest.mark.parametrize("argument", [False, True], ids=["file", "argument before a file"])
def test_argument_or_file_names_the_database(folder: Path, monkeypatch: pytest.MonkeyPatch, argument: bool) -> None:
    url = held(folder / "url", f"sqlite:///{folder / 'of_file.sqlite3'}\n")
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL_FILE", "absent" if argument else url)
    named = ["--database-url", f"sqlite:///{folder / 'of_argument.sqlite3'}"] if argument else []
    assert main(["db", "upgrade", *named]) == 0
    assert (folder / f"of_{'argument' if argument else 'file'}.sqlite3").exists()


def test_client_reads_the_token_from_a_file(folder: Path) -> None:
    path = held(folder / "token", "zbso_1_abc\n")
    assert access_token({"ZEUS_BSO_TOKEN_FILE": path}) == "zbso_1_abc"
    assert access_token({"ZEUS_BSO_TOKEN": "of-variable", "ZEUS_BSO_TOKEN_FILE": ""}) == "of-variable"
    assert access_token({}) is None
    absent = {"ZEUS_SERVER_URL": "http://bso.example", "ZEUS_BSO_TOKEN_FILE": "absent"}
    with client_from_environment(token="argument", environ=absent):  # noqa: S106 - no real token
        pass
    with pytest.raises(ZeusBSOConfigError, match=r"ZEUS_BSO_TOKEN_FILE: the file cannot be read: .*absent"):
        client_from_environment(environ=absent)
    with pytest.raises(ZeusBSOConfigError, match=r"ZEUS_BSO_TOKEN_FILE: the file .* is empty"):
        access_token({"ZEUS_BSO_TOKEN_FILE": held(folder / "empty", " \n")})
    with pytest.raises(ZeusBSOConfigError, match="both ZEUS_BSO_TOKEN and ZEUS_BSO_TOKEN_FILE are set"):
        access_token({"ZEUS_BSO_TOKEN": "abc", "ZEUS_BSO_TOKEN_FILE": path})


def test_command_reads_the_token_from_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEUS_BSO_TOKEN_FILE", str(folder / "absent"))
    assert main(["jobs", "list", "--server-url", "http://127.0.0.1:9"]) == 1
    assert "ZEUS_BSO_TOKEN_FILE: the file cannot be read" in capsys.readouterr().err
