"""The ``bso-server report`` command: the report on all jobs of a database or a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlencode

from bso_server.cli.common import Commands, add_command, settings_of
from bso_server.cli.jobs import ask_or_read, written
from bso_server.service.fleet import FleetReader, length_of
from bso_server.service.views import FleetPage, Tariff
from zeus_plugins.protocol import Paths


def add_report_command(commands: Commands) -> None:
    """Add ``report``."""
    report = add_command(commands, "report", "what all jobs used and saved, for those who pay", _report, or_server=True)
    report.add_argument("--since", type=_period, default="30d", help="length of the period, such as 12h, 30d or 8w")
    report.add_argument(
        "--by", default="owner", metavar="GROUP", help="group jobs by owner, model, gpu, job, or the name of a tag"
    )
    report.add_argument("--format", choices=["md", "html", "csv", "json"], default="md", help="default: md")
    report.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: standard output)")


def _period(text: str) -> str:
    try:
        length_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _report(options: argparse.Namespace) -> None:
    # Imported here, because other commands do not need the texts of pages.
    from bso_server.ui import fleet, html

    tariff = Tariff.model_validate(settings_of(options), from_attributes=True)
    path = f"{Paths.FLEET_REPORT}?{urlencode({'since': options.since, 'by': options.by})}"
    page = ask_or_read(
        options, "GET", path, FleetPage, lambda store: FleetReader(store, tariff).read(options.since, options.by)
    )
    match options.format:
        case "md":
            text = fleet.markdown(page)
        case "html":
            text = html.report_page(page, page.until)
        case "csv":
            text = fleet.csv(page)
        case _:
            text = page.model_dump_json(indent=2) + "\n"
    with written(options.output) as file:
        file.write(text)
