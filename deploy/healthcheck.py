"""The health check of a container, with only the standard library.

It asks the server on this machine, at the port ``ZEUS_BSO_SERVER_PORT``, whether it is ready. If so, the exit status is
0; otherwise it is 1, and one line on standard output, which container engines record, states the reason.
"""

from __future__ import annotations

import http.client
import os

_PORT = 8000
_TIMEOUT_S = 5.0


def main() -> int:
    """Ask the server once; return the exit status."""
    port = int(os.environ.get("ZEUS_BSO_SERVER_PORT") or _PORT)
    # `http.client` ignores the proxies of the environment.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer on port {port}: {error}")
        return 1
    finally:
        connection.close()
    if answer.status != http.client.OK:
        print(f"{answer.status}: {said}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
