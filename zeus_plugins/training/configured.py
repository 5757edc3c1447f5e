"""Arguments as configuration files give them: a job as a mapping of its fields, a token that is not to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import SecretStr, ValidationError

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import JobSpec

# What jsonargparse (LightningCLI) saves in place of a secret.
_MASK = "**********"


def as_job(job: JobSpec | Mapping[str, Any]) -> JobSpec:
    """The job, of its fields in a mapping.

    Raises:
        ZeusBSOConfigError: A field is missing or out of its range, or it is no mapping.
    """
    if isinstance(job, JobSpec):
        return job
    if not isinstance(job, Mapping):
        raise ZeusBSOConfigError(f"job is a {type(job).__name__}: give a JobSpec, or its fields as a dict")
    try:
        return JobSpec.model_validate({name: _plain(value) for name, value in job.items()})
    except ValidationError as error:
        problems = "; ".join(
            ": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, "))))
            for one in error.errors()
        )
        raise ZeusBSOConfigError(f"job does not describe a JobSpec: {problems}") from None


def revealed(token: SecretStr | str | None) -> str | None:
    """The token itself; None for what a saved configuration has in its place."""
    text = token.get_secret_value() if isinstance(token, SecretStr) else token
    return None if text == _MASK else text


def _plain(value: Any) -> Any:
    """A list in place of what only behaves as one, such as OmegaConf's."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list else value
