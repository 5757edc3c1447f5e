"""Settings of the server. Precedence: argument, then environment, then ``.env``, then default.

``ZEUS_BSO_<FIELD>_FILE``, in the environment or ``.env``, names a file with the value of a setting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_data_path
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from bso_server.core.access import SingleSignOn
from bso_server.core.job import LeasePolicy
from bso_server.storage.deadlines import PATIENCE_S

PREFIX = "ZEUS_BSO_"
ENV_FILE = ".env"
FILE_SUFFIX = "_FILE"

# Seconds; about three years at most, because longer leases could overflow dates.
Lease = Annotated[float, Field(gt=0, le=1e8)]
_LEASES = LeasePolicy()

# Fields of earlier versions, each with what to do instead.
_REMOVED = {
    "crash_retries": "a batch size that has never completed a run is excluded after three crashes",
    "echo_sql": "log_statement of PostgreSQL, or general_log of MariaDB, logs the statements",
    "heartbeat_interval_s": "trainings send six heartbeats in ZEUS_BSO_HEARTBEAT_LEASE_S",
    "log_format": "uvicorn --log-config FILE bso_server.app:app logs in a format of your own",
    "max_body_bytes": "a request has at most 1 MiB; a proxy can limit it further",
    "pue": "multiply ZEUS_BSO_PRICE_PER_KWH and ZEUS_BSO_CARBON_G_PER_KWH by it",
    "rate_limit_per_minute": "limit the requests of an address in the proxy, such as by limit_req of nginx",
    "sso_admins": "single sign-on is for reading the pages; bso-server token makes and revokes tokens",
    "tracing": "docs/metrics.md shows how to trace the server with OpenTelemetry's middleware",
}


def default_database_url() -> str:
    """Return the URL of a SQLite file in the user's data directory; raise `ValueError` for a user without one."""
    try:
        return f"sqlite:///{Path(user_data_path('zeus-bso')) / 'bso.sqlite3'}"
    except RuntimeError as error:
        raise ValueError(f"{error}, or name a database by {variable_of('database_url')}") from error


class Settings(BaseSettings):
    """Settings of the server. Each field is also the environment variable ``ZEUS_BSO_<FIELD>``.

    Attributes:
        database_url: SQLAlchemy URL of the database.
        db_user: User of the database, if the URL names none.
        db_password: Password of the database, if the URL has none.
        database_timeout_s: Seconds that a request waits for the database, including its locks.
        server_host: Address to listen on.
        server_port: Port to listen on.
        log_level: Lowest level that is logged.
        reap_interval_s: Seconds between two searches for expired trials.
        heartbeat_lease_s: Seconds without a heartbeat after which a training with heartbeats counts as abandoned. It
            sends one in each sixth of this time.
        silent_lease_s: Seconds without a report after which a training without heartbeats counts as abandoned; at least
            five times its longest epoch.
        suspended_lease_s: Seconds in which a preempted training must resume.
        insecure: True to serve every client without a token (``serve --insecure``).
        allowed_hosts: Host names that requests may use, separated by commas; ``*.example`` matches all names below
            ``example``, and ``*`` every host.
        sso_proxies: Addresses or networks of proxies that authenticate the readers of the pages, separated by commas;
            None: no header names a user.
        sso_header: Header in which such a proxy names its user, who may read the pages.
        read_timeout_s: Seconds in which a client must send the head of a request, and the same time again for its body.
        price_per_kwh: Price of a kilowatt-hour for the dashboard; None: it shows no money.
        currency: Currency of the price, such as ``EUR``.
        carbon_g_per_kwh: Grams of CO2 equivalent per kilowatt-hour; None: the dashboard shows none.
        metrics: Access to the metrics: callers with the right to read jobs (``token``), or everyone (``open``).
        metrics_jobs: Pattern of the ids of jobs with metrics of their own, such as ``nightly-*``; None: no job.

    Raises:
        pydantic.ValidationError: A value is invalid; `problems` describes it.
        ValueError: The file of a setting cannot be read or is empty, both a setting and its file are given, or a
            variable is a setting of an earlier version.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=ENV_FILE, extra="ignore", frozen=True)

    database_url: str = Field(default_factory=default_database_url)
    db_user: str | None = None
    db_password: SecretStr | None = None
    database_timeout_s: Annotated[float, Field(ge=1, le=3600)] = PATIENCE_S
    server_host: str = "127.0.0.1"
    server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"] = "INFO"
    reap_interval_s: Annotated[float, Field(gt=0)] = 60.0
    heartbeat_lease_s: Lease = _LEASES.heartbeat_lease_s
    silent_lease_s: Lease = _LEASES.silent_lease_s
    suspended_lease_s: Lease = _LEASES.suspended_lease_s
    insecure: bool = False
    allowed_hosts: Annotated[str, Field(min_length=1)] = "*"
    sso_proxies: str | None = None
    sso_header: Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,64}$")] = "X-Forwarded-User"
    read_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    price_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    currency: Annotated[str, Field(max_length=10)] | None = None
    carbon_g_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    metrics: Literal["token", "open"] = "token"
    metrics_jobs: Annotated[str, Field(min_length=1, max_length=255)] | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Replace the names of files by their contents, except for settings that an earlier source sets."""
        stated = {variable_of(name).lower() for name in init_settings()}
        for source in (env_settings, dotenv_settings):
            assert isinstance(source, EnvSettingsSource)  # nosec B101  # noqa: S101 - for mypy: the base class has no variables
            _refuse_removed(source.env_vars)
            source.env_vars = _with_files(source.env_vars, stated)
            stated |= source.env_vars.keys()
        return init_settings, env_settings, dotenv_settings, file_secret_settings

    @property
    def leases(self) -> LeasePolicy:
        """Durations of leases, from the settings."""
        return LeasePolicy(
            heartbeat_lease_s=self.heartbeat_lease_s,
            silent_lease_s=self.silent_lease_s,
            suspended_lease_s=self.suspended_lease_s,
        )

    @property
    def single_sign_on(self) -> SingleSignOn | None:
        """Single sign-on by the proxies in the settings, or None without such proxies."""
        proxies = tuple(map(ip_network, parts(self.sso_proxies)))
        return SingleSignOn(proxies, self.sso_header) if proxies else None

    @field_validator("sso_proxies")
    @classmethod
    def _are_addresses(cls, proxies: str | None) -> str | None:
        list(map(ip_network, parts(proxies)))
        return proxies


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def file_variable_of(name: str) -> str:
    """Return the environment variable with the path of a file that contains a setting."""
    return variable_of(name) + FILE_SUFFIX


def secret(variable: str, environ: Mapping[str, str | None]) -> str | None:
    """Return the value of a variable, or the content of the file that `variable` with ``_FILE`` appended names.

    Line feeds at the end of the file are removed. Empty variables count as unset.

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


def parts(text: str | None) -> tuple[str, ...]:
    """Return the parts of a list that commas separate."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _refuse_removed(variables: Collection[str]) -> None:
    """Raise `ValueError` if a variable (in lower case) is a setting of an earlier version."""
    for name, instead in _REMOVED.items():
        if variable_of(name).lower() in variables:
            raise ValueError(f"the setting {variable_of(name)} was removed, unset it: {instead}")


def _with_files(variables: Mapping[str, str | None], stated: Collection[str]) -> dict[str, str | None]:
    """Return the variables, in lower case; read the file of each setting that has one and is not in `stated`."""
    values = dict(variables)
    for name in Settings.model_fields:
        setting, file = variable_of(name), file_variable_of(name)
        if setting.lower() not in stated and values.get(file.lower()):
            values[setting.lower()] = secret(setting, {each: values.get(each.lower()) for each in (setting, file)})
    return values


def problems(error: ValidationError | UnicodeDecodeError) -> str:
    """Return the errors of the settings in one line, each with its environment variable or file."""
    if isinstance(error, UnicodeDecodeError):
        return f"the file {ENV_FILE}, which is no text in UTF-8: {error}"
    return "; ".join(f"{variable_of(str(line['loc'][0]))}: {line['msg']}" for line in error.errors())
