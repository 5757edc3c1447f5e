"""Parameters beside the body."""

from __future__ import annotations

from typing import Annotated

from litestar.params import Parameter

from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH

JobId = Annotated[str, Parameter(pattern=ID_PATTERN, max_length=MAX_ID_LENGTH)]

IdempotencyKey = Annotated[
    str | None, Parameter(header="Idempotency-Key", pattern=r"^[\x21-\x7e]+$", min_length=1, max_length=255)
]
