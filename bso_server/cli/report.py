"""The ``bso-server report`` command: the report on all jobs of a database or a server."""

from __future__ import annotations

import argparse
import re
from urllib.parse import urlencode

from bso_server.cli.common import Commands, RemovedOption, add_command, duration, settings_of
from bso_server.cli.jobs import OUTPUT, ask_or_read
from bso_server.service.fleet import GROUP, FleetReader
from bso_server.service.verdicts import update_all
from bso_server.service.views import FleetPage, Tariff
from bso_server.storage.store import Store
from zeus_plugins.protocol import Paths


def add_report_command(commands: Commands) -> None:
    """Add ``report``."""
    report = add_command(commands, "report", "what all jobs used and saved, for those who pay", _report, or_server=True)
    report.add_argument("--since", type=_period, default="30d", help="length of the period, such as 12h, 30d or 8w")
    help_by = "group jobs by owner, model, gpu, job, or the name of a tag"
    report.add_argument("--by", type=_group, default="owner", metavar="GROUP", help=help_by)
    report.add_argument("--format", type=_format, metavar="{md,json}", default="md", help="default: md")
    report.add_argument("--output", action=RemovedOption, instead=OUTPUT)


def _period(text: str) -> str:
    duration(text)
    return text


def _group(text: str) -> str:
    if not re.fullmatch(GROUP, text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be the name of a tag: letters, digits, dots, _ and - only")
    return text


def _format(text: str) -> str:
    if text not in ("md", "json"):
        # Earlier versions also had html and csv.
        raise argparse.ArgumentTypeError(f"{text!r} is no format: md or json; for HTML, save the page /ui/report")
    return text


def _report(options: argparse.Namespace) -> None:
    # Imported here, because other commands do not need the texts of pages.
    from bso_server.ui import fleet

    tariff = Tariff.model_validate(settings_of(options), from_attributes=True)
    path = f"{Paths.FLEET_REPORT}?{urlencode({'since': options.since, 'by': options.by})}"

    async def read(store: Store) -> FleetPage:
        await update_all(store)
        return await FleetReader(store, tariff).read(options.since, options.by)

    page = ask_or_read(options, "GET", path, FleetPage, read)
    text = fleet.markdown(page) if options.format == "md" else page.model_dump_json(indent=2) + "\n"
    print(text, end="")
