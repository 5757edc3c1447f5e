"""The yardstick: the least that Litestar does with a JSON body, in a process of its own.

``python -m benchmarks.bare --port 9000`` serves one route that decodes the body and sends it back.
"""

from __future__ import annotations

import argparse
from http import HTTPStatus
from typing import Any

import uvicorn
from litestar import Litestar, post

from zeus_plugins.protocol import Paths


@post(Paths.REPORT, status_code=HTTPStatus.OK)
async def echo(data: dict[str, Any]) -> dict[str, Any]:
    """Answer with the body."""
    return data


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    port = parser.parse_args().port
    # The options of `bso-server serve`: a comparison between two set-ups of uvicorn would say nothing.
    uvicorn.run(Litestar([echo], logging_config=None), host="127.0.0.1", port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
