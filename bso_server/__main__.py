"""``python -m bso_server`` is ``bso-server``."""

from bso_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
