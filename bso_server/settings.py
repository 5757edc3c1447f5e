"""The server's settings. Precedence: argument, then environment, then ``.env``, then default.

The environment and ``.env`` may each name a file that holds a setting's value instead, ``ZEUS_BSO_<FIELD>_FILE``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from platformdirs import user_data_path
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from bso_server.core.job import LeasePolicy
from bso_server.storage.deadlines import PATIENCE_S

PREFIX = "ZEUS_BSO_"
ENV_FILE = ".env"
FILE_SUFFIX = "_FILE"

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
        log_level: The least level that is logged.
        log_format: The form of the log's lines, text or JSON.
        echo_sql: True to log every SQL statement.
        crash_retries: Crashes after which a batch size that never ran to its end is given up.
        reap_interval_s: Seconds between two searches for trials whose trainings are no longer heard of.
        heartbeat_interval_s: Seconds after which trainings that send heartbeats are asked to send the next one.
        heartbeat_lease_s: Seconds of silence after which such a training counts as abandoned; more than the interval.
        silent_lease_s: The same for a training that only reports; five times its longest epoch if that is longer.
        suspended_lease_s: Seconds that a preempted training may take to come back.
        insecure: True to serve everybody without a token (``serve --insecure``).
        allowed_hosts: Host names that requests may be sent to, separated by commas; ``*.example`` stands for all names
            below ``example``, and ``*`` for every host.
        max_body_bytes: Size in bytes of the largest request body that is taken.
        read_timeout_s: Seconds that a client may take to send the head of a request, and again to send its body.
        rate_limit_per_minute: Requests that one address may make within a minute, per server process; None: any number.
        price_per_kwh: What a kilowatt-hour costs, for the dashboard; None: it speaks of no money.
        currency: That currency, as it is shown, such as ``EUR``.
        carbon_g_per_kwh: Grams of CO2 equivalent that a kilowatt-hour stands for; None: it speaks of none.
        metrics: The readers of metrics: those who may read jobs (``token``), everybody (``open``), or nobody (``off``).
        metrics_jobs: Pattern of the ids of jobs, such as ``nightly-*``, whose metrics name them; None: none are named.
        tracing: True to trace requests by OpenTelemetry.

    Raises:
        pydantic.ValidationError: A value does not fit its field; `problems` puts it in words.
        ValueError: A file that holds a setting cannot be read or is empty, or a setting is given beside its file.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=ENV_FILE, extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database_url)
    db_user: str | None = None
    db_password: SecretStr | None = None
    database_timeout_s: Annotated[float, Field(ge=1, le=3600)] = PATIENCE_S
    server_host: str = "127.0.0.1"
    server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"] = "INFO"
    log_format: Literal["text", "json"] = "text"
    echo_sql: bool = False
    crash_retries: Annotated[int, Field(ge=1)] = 3
    reap_interval_s: Annotated[float, Field(gt=0)] = 60.0
    # The lease's validator sees the fields above its own only.
    heartbeat_interval_s: Lease = 60.0
    heartbeat_lease_s: Lease = 360.0
    silent_lease_s: Lease = 3600.0
    suspended_lease_s: Lease = 86400.0
    insecure: bool = False
    allowed_hosts: Annotated[str, Field(min_length=1)] = "*"
    max_body_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024
    read_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    rate_limit_per_minute: Annotated[int, Field(gt=0)] | None = None
    price_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    currency: Annotated[str, Field(max_length=10)] | None = None
    carbon_g_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    metrics: Literal["token", "open", "off"] = "token"
    metrics_jobs: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    tracing: bool = False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put what files hold in the place of their names. A file is not read if its setting is stated before it."""
        stated = {variable_of(name).lower() for name in init_settings()}
        for source in (env_settings, dotenv_settings):
            assert isinstance(source, EnvSettingsSource)  # noqa: S101 - for mypy: the base class has no variables
            source.env_vars = _with_files(source.env_vars, stated)
            stated |= source.env_vars.keys()
        return init_settings, env_settings, dotenv_settings, file_secret_settings

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


def file_variable_of(name: str) -> str:
    """The environment variable with the path of a file that holds a setting."""
    return variable_of(name) + FILE_SUFFIX


def secret(variable: str, environ: Mapping[str, str | None]) -> str | None:
    """The value of a variable, or what is in the file that the variable with ``_FILE`` behind its name names.

    The line feeds that end the file are no part of the value. Empty variables count as not set.

    Raises:
        ValueError: Both variables are set, or the file cannot be read or is empty.
    """
    file_variable = variable + FILE_SUFFIX
    value, path = environ.get(variable) or None, environ.get(file_variable) or None
    if path is None:
        return value
    if value is not None:
        raise ValueError(f"both {variable} and {file_variable} are set: unset one of them")
    try:
        value = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file_variable}: the file cannot be read: {error}") from error
    if not value:
        raise ValueError(f"{file_variable}: the file {path} is empty")
    return value


def _with_files(variables: Mapping[str, str | None], stated: Collection[str]) -> dict[str, str | None]:
    """Variables, named in lower case, and the settings in the files that they name, but for settings stated before."""
    values = dict(variables)
    for name in Settings.model_fields:
        setting, file = variable_of(name), file_variable_of(name)
        if setting.lower() not in stated and values.get(file.lower()):
            values[setting.lower()] = secret(setting, {each: values.get(each.lower()) for each in (setting, file)})
    return values


def problems(error: ValidationError) -> str:
    """The faults of the settings, each with its environment variable."""
    return "; ".join(f"{variable_of(str(line['loc'][0]))}: {line['msg']}" for line in error.errors())


def source_of(name: str, arguments: Mapping[str, Any]) -> str:
    """The source of a setting's value: ``argument`` (of the command line), ``environment``, ``.env`` or ``default``.

    ``environment, from a file`` and ``.env, from a file``: the variable names a file with the value.
    """
    if name in arguments:
        return "argument"
    for source, variables in (("environment", os.environ), (ENV_FILE, dotenv_values(ENV_FILE))):
        values = {key.casefold(): value for key, value in variables.items()}
        if values.get(file_variable_of(name).casefold()):
            return f"{source}, from a file"
        if variable_of(name).casefold() in values:
            return source
    return "default"
