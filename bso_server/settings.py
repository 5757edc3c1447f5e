"""The server's settings. Precedence: argument, then environment, then ``.env``, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from platformdirs import user_data_path
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from bso_server.core.job import LeasePolicy
from bso_server.storage.deadlines import PATIENCE_S

PREFIX = "ZEUS_BSO_"
ENV_FILE = ".env"

# Seconds; three years and more would only overflow dates.
Lease = Annotated[float, Field(gt=0, le=1e8)]


def default_database_url() -> str:
    """A SQLite file in the user's data directory."""
    return f"sqlite:///{Path(user_data_path('zeus-bso')) / 'bso.sqlite3'}"


class Settings(BaseSettings):
    """The settings of the server. Each field is also the environment variable ``ZEUS_BSO_<FIELD>``.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        db_user: User of the database, where the URL names none.
        db_password: Password of the database, where the URL holds none.
        database_timeout_s: Seconds that a request waits for the database, and for what others have locked in it.
        server_host: Address to listen on.
        server_port: Port to listen on.
        log_level: What is logged.
        echo_sql: Whether every SQL statement is logged.
        crash_retries: Crashes after which a batch size that never ran to its end is given up.
        reap_interval_s: Seconds between two searches for trials whose trainings are no longer heard of.
        heartbeat_interval_s: Seconds after which trainings that send heartbeats are asked to send the next one.
        heartbeat_lease_s: Seconds of silence after which such a training counts as abandoned.
        silent_lease_s: The same for a training that only reports; five times its longest epoch if that is longer.
        suspended_lease_s: Seconds that a preempted training may take to come back.
        insecure: Whether everybody is served without a token.
        allowed_hosts: Host names that requests may be sent to, separated by commas; ``*.example`` stands for all names
            below ``example``, and ``*`` for every host.
        max_body_bytes: Size in bytes of the largest request body that is taken.
        read_timeout_s: Seconds that a client may take to send the head of a request, and again to send its body.
        rate_limit_per_minute: Requests that one address may make within a minute, per server process; None: any number.

    Raises:
        pydantic.ValidationError: A value does not fit its field; `problems` puts it in words.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=ENV_FILE, extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database_url)
    db_user: str | None = None
    db_password: SecretStr | None = None
    database_timeout_s: Annotated[float, Field(ge=1, le=3600)] = PATIENCE_S
    server_host: str = "127.0.0.1"
    server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"] = "INFO"
    echo_sql: bool = False
    crash_retries: Annotated[int, Field(ge=1)] = 3
    reap_interval_s: Annotated[float, Field(gt=0)] = 60.0
    # The lease's validator sees the fields above its own only.
    heartbeat_interval_s: Lease = 30.0
    heartbeat_lease_s: Lease = 180.0
    silent_lease_s: Lease = 3600.0
    suspended_lease_s: Lease = 86400.0
    insecure: bool = False
    allowed_hosts: Annotated[str, Field(min_length=1)] = "*"
    max_body_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024
    read_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    rate_limit_per_minute: Annotated[int, Field(gt=0)] | None = None

    @property
    def leases(self) -> LeasePolicy:
        """The leases that the settings state."""
        return LeasePolicy(
            heartbeat_interval_s=self.heartbeat_interval_s,
            heartbeat_lease_s=self.heartbeat_lease_s,
            silent_lease_s=self.silent_lease_s,
            suspended_lease_s=self.suspended_lease_s,
        )

    @field_validator("heartbeat_lease_s")
    @classmethod
    def _outlives_a_heartbeat(cls, lease_s: float, others: ValidationInfo) -> float:
        interval_s = others.data.get("heartbeat_interval_s")
        if interval_s is not None and lease_s <= interval_s:
            raise ValueError(
                f"{lease_s:g} s must be more than {variable_of('heartbeat_interval_s')}, {interval_s:g} s, or every "
                "training is abandoned between two heartbeats"
            )
        return lease_s


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def problems(error: ValidationError) -> str:
    """The faults of the settings, each with its environment variable."""
    return "; ".join(f"{variable_of(str(line['loc'][0]))}: {line['msg']}" for line in error.errors())


def source_of(name: str, arguments: Mapping[str, Any]) -> str:
    """The source of a setting's value: ``argument`` (of the command line), ``environment``, ``.env`` or ``default``."""
    variable = variable_of(name).casefold()
    if name in arguments:
        return "argument"
    if any(key.casefold() == variable for key in os.environ):
        return "environment"
    if any(key.casefold() == variable for key in dotenv_values(ENV_FILE)):
        return ENV_FILE
    return "default"
