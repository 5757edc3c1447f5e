"""``python -m release``: see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from release import changelog, licences
from release.packages import DIST, Environment, ReleaseError, bill_of_materials, build, check
from release.project import ROOT, users_extras, version


def main() -> int:
    """Run a command; the exit status is 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    notes = commands.add_parser(
        "notes", help="print what the changelog says of the version; fail where that is nothing"
    )
    notes.add_argument("--tag", help="fail unless the version has this tag, such as v1.2.3")
    commands.add_parser("build", help="build both packages into dist/, with a bill of materials")
    checks = commands.add_parser("check", help="install the wheel in dist/ into empty environments, and use it")
    checks.add_argument("--python", action="append", help="an interpreter, more than once for several (default: this)")
    checks.add_argument(
        "--extra", action="append", help="an extra, more than once for several; '' is none (default: that, and each)"
    )
    commands.add_parser("licences", help="write docs/licences.md")
    options = parser.parse_args()
    try:
        match options.command:
            case "notes":
                print(_notes(options.tag))
            case "build":
                sdist, wheel = build()
                print(sdist, wheel, bill_of_materials(wheel), sep="\n")
            case "check":
                (wheel,) = DIST.glob("*.whl")
                check(wheel, options.python or [sys.executable], options.extra)
            case "licences":
                _write_licences()
    except (ReleaseError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _notes(tag: str | None) -> str:
    if tag is not None and tag != f"v{version()}":
        raise ReleaseError(f"the tag is {tag}, and pyproject.toml says version {version()}, whose tag is v{version()}")
    return changelog.notes((ROOT / "CHANGELOG.md").read_text(), version())


def _write_licences() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment.empty(Path(folder) / "environment")
        # Older ones do not read licence expressions (PEP 639).
        environment.install("--upgrade", "pip>=25.1")
        report = environment.resolved(f"{ROOT}[{','.join(users_extras())}]")
    licences.PAGE.write_text(licences.page(report))


if __name__ == "__main__":
    sys.exit(main())
