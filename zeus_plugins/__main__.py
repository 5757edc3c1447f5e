"""``python -m zeus_plugins`` is ``zeus-plugins``."""

from zeus_plugins.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
