"""The server's settings. Precedence: argument, then environment, then ``.env``, then default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_data_path
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def default_database_url() -> str:
    """A SQLite file in the user's data directory."""
    return f"sqlite:///{Path(user_data_path('zeus-bso')) / 'bso.sqlite3'}"


class Settings(BaseSettings):
    """How the server runs. Each field is also the environment variable ``ZEUS_BSO_<FIELD>``.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        server_host: Address to listen on.
        server_port: Port to listen on.
        log_level: What is logged.
        echo_sql: Whether every SQL statement is logged.

    Raises:
        pydantic.ValidationError: A value does not fit its field.
    """

    model_config = SettingsConfigDict(env_prefix="ZEUS_BSO_", env_file=".env", extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database_url)
    server_host: str = "127.0.0.1"
    server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"] = "INFO"
    echo_sql: bool = False
