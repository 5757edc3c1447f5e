"""The server's settings. Precedence: argument, then environment, then ``.env``, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from platformdirs import user_data_path
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "ZEUS_BSO_"
ENV_FILE = ".env"


def default_database_url() -> str:
    """A SQLite file in the user's data directory."""
    return f"sqlite:///{Path(user_data_path('zeus-bso')) / 'bso.sqlite3'}"


class Settings(BaseSettings):
    """How the server runs. Each field is also the environment variable ``ZEUS_BSO_<FIELD>``.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        db_user: User of the database, where the URL names none.
        db_password: Password of the database, where the URL holds none.
        server_host: Address to listen on.
        server_port: Port to listen on.
        log_level: What is logged.
        echo_sql: Whether every SQL statement is logged.
        crash_retries: Crashes after which a batch size that never ran to its end is given up.
        reap_interval_s: Seconds between two searches for trials whose trainings are no longer heard of.
        insecure: Whether everybody is served without a token.
        allowed_hosts: Host names that requests may be sent to, separated by commas; ``*.example`` stands for all names
            below ``example``, and ``*`` for every host.
        max_body_bytes: Size in bytes of the largest request body that is taken.
        rate_limit_per_minute: Requests that one address may make within a minute, per server process; None: any number.

    Raises:
        pydantic.ValidationError: A value does not fit its field; `problems` puts it in words.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=ENV_FILE, extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database_url)
    db_user: str | None = None
    db_password: SecretStr | None = None
    server_host: str = "127.0.0.1"
    server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"] = "INFO"
    echo_sql: bool = False
    crash_retries: Annotated[int, Field(ge=1)] = 3
    reap_interval_s: Annotated[float, Field(gt=0)] = 60.0
    insecure: bool = False
    allowed_hosts: Annotated[str, Field(min_length=1)] = "*"
    max_body_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024
    rate_limit_per_minute: Annotated[int, Field(gt=0)] | None = None


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def source_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Where a setting's value comes from: ``argument``, ``environment``, ``.env`` or ``default``.

    Args:
        name: The setting.
        arguments: What was given on the command line.
    """
    variable = variable_of(name).casefold()
    if name in arguments:
        return "argument"
    if any(key.casefold() == variable for key in os.environ):
        return "environment"
    if any(key.casefold() == variable for key in dotenv_values(ENV_FILE)):
        return ENV_FILE
    return "default"
