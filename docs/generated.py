"""Generated files: reference pages from the code, and Prometheus operator alerts; ``make reference`` runs this."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from litestar import Litestar

from bso_server import cli as server_cli
from bso_server.api.auth import needed_scope
from bso_server.api.openapi import completed
from bso_server.app import create_app
from bso_server.settings import Settings, variable_of
from zeus_plugins import cli as client_cli

DOCS = Path(__file__).parent
PARSERS = {"bso-server": server_cli._parser, "zeus-plugins": client_cli._parser}
COMMON = 5
"""Number of commands from which an option with one text is described once for all of them."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

Schema = Mapping[str, Any]


def attribute_texts(documented: type) -> dict[str, str]:
    """Return the description of each attribute in the section ``Attributes`` of a class's docstring, by name."""
    _, _, section = (inspect.getdoc(documented) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.+(?:\n {6,}.+)*)", section.split("\n\n")[0], re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`") for name, text in found}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# Settings


def settings_page() -> str:
    """Return the page of settings, with the values, the default and the meaning of each."""
    texts, properties = attribute_texts(Settings), Settings.model_json_schema()["properties"]
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.get_default()
        if field.default_factory is not None:
            shown = "a SQLite file in your data directory"
        else:
            shown = "none" if default is None else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        taken = values(properties[name]).removesuffix(" or null")
        rows.append((f"`{variable_of(name)}`", taken, shown, texts[name].removesuffix(".")))
    return f"""# Settings of the server

The server reads each setting from the arguments of `bso-server`, then the environment, then `.env` in the working
directory. If a value is invalid, the server ends at its
start and names the variable. [environment.md](environment.md) lists the variables of trainings.

A file can contain the value of a setting, such as a secret that a platform provides. Append `_FILE` to the name of the
setting, and give the path of the file: `ZEUS_BSO_DATABASE_URL_FILE=/run/secrets/database_url`. Line feeds at the end of
the file do not count. An absent or empty file is an error.

If one source has both a setting and its file, this is an error. Between sources, the order above applies: an argument
precedes any file, and a file that the environment names precedes the setting in `.env`.

{table(("setting", "values", "default", "meaning"), rows)}
"""


def values(schema: Schema) -> str:
    """Describe in words the values that a JSON schema allows."""
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        bounds = {key: value for key, value in schema.items() if key not in {"anyOf", "oneOf"}}
        return " or ".join(values({**bounds, **one} if one.get("type") != "null" else one) for one in alternatives)
    if choices := schema.get("enum"):
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = schema.get("type", "any JSON")
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{word} {schema[key]:g}" for key, word in words.items() if abs(schema.get(key, 2**31)) < 2**31 - 1]
    if "maxLength" in schema:
        bounds.append(f"at most {schema['maxLength']} characters")
    name = {"null": "null", "integer": "integer", "number": "number", "string": "text"}.get(kind, kind)
    return " ".join([name, ", ".join(bounds)]).strip()


# Commands


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands that have no subcommands, in order."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for child in action.choices.values():
            yield from leaves(child)


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the short help of each command below `parser`, by the command's full name."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {action.choices[one.dest].prog: one.help or "" for one in action._choices_actions}
            for child in action.choices.values():
                found |= helps(child)
    return found


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each argument of a command with its help."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else parser._get_formatter()._format_args(action, (action.dest.upper()))
        if choices := action.choices:
            value = value if action.metavar else "|".join(map(str, choices))
        name = ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)
        yield name or f"`{value}`", parser._get_formatter()._expand_help(action) if action.help else ""


def commands_page() -> str:
    """Return the page of commands, with the arguments and texts that ``--help`` prints."""
    parts = []
    for program, make in PARSERS.items():
        parser = make()
        short = helps(parser)
        commands = {leaf: list(options_of(leaf)) for leaf in leaves(parser)}
        takers: dict[tuple[str, str], list[str]] = {}
        for leaf, options in commands.items():
            for option in options:
                takers.setdefault(option, []).append(f"`{leaf.prog.removeprefix(program).strip()}`")
        common = {one: by for one, by in takers.items() if len(by) >= COMMON and one[0].startswith("`-")}
        parts.append(f"## `{program}`\n\n{parser.description} `{program} --version` prints the version.")
        if common:
            rows = (
                (name, "all" if len(by) == len(commands) else ", ".join(by), text)
                for (name, text), by in common.items()
            )
            parts.append(table(("option of several commands", "commands", "meaning"), rows))
        for leaf, options in commands.items():
            said = leaf.description or short[leaf.prog]
            text = " ".join((said[0].upper() + said[1:]).split()).removesuffix(".") + "."
            unexplained = [name.strip("`") for name, meaning in options if not meaning]
            parts.append(f"### {' '.join([f'`{leaf.prog}`', *unexplained])}\n\n{text}")
            if own := [option for option in options if option[1] and option not in common]:
                parts.append(table(("argument", "meaning"), own))
    return (
        "# Commands\n\nEach command prints its part of this page with `--help`. "
        "[reference.md](reference.md#exit-statuses) lists the exit statuses.\n\n" + "\n\n".join(parts) + "\n"
    )


# Routes


def routes_page() -> str:
    """Return the page of routes, from the OpenAPI document."""
    app = create_app(Settings(_env_file=None, database_url="sqlite:///bso.sqlite3"))
    document = completed(app.openapi_schema.to_schema())
    needs = {(method, path): need for path, method, need in scopes(app)}
    rows, errors = [], {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            if verb == "head":  # it answers like its GET
                continue
            method = verb.upper()
            if method == "HEAD":  # answered as GET without a body
                continue
            rows.append((f"`{method} {path}`", needs[method, path], operation["description"]))
            errors |= {
                status: answer["description"]
                for status, answer in operation["responses"].items()
                if not status.startswith("2")
            }
    return f"""# Routes of the server

The server describes its routes, parameters and messages as OpenAPI {document["openapi"]}, for example for a viewer:

```sh
curl -H "Authorization: Bearer $ZEUS_BSO_TOKEN" http://bso.example:8000/schema/openapi.json
```

A [token](tokens.md) must have the scope of the route. Each scope includes those before it: `read`, `report`, `admin`.

{table(("route", "scope", "does"), rows)}

Unknown fields are ignored; NaN and infinities are refused. The routes of Zeus 0.16 are those of `/jobs`,
`/jobs/batch_size`, `/report` and `PATCH /trials`. The [pages](dashboard.md) are below `/ui/`, and need `read`.
The document has the bounds of each field, and [zeus_plugins/protocol](../zeus_plugins/protocol) describes it.

## Errors

Errors are problem details (RFC 9457), with the text in `detail` and `message`; 503 carries `Retry-After`.

{table(("status", "means"), sorted((f"`{status}`", text) for status, text in errors.items()))}
"""


def scopes(app: Litestar) -> Iterator[tuple[str, str, str]]:
    """Yield path, method and required scope of each route, as `bso_server.api.auth` reads them."""
    for found in app.routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", found.path)
        for handler in found.route_handlers:
            need = needed_scope(handler)
            for method in [one for one in METHODS if one in handler.http_methods]:
                yield path, method, "none" if need is None else f"`{need.value}`"


# Alerts


def prometheus_rule() -> str:
    """Return the alert rules as a ``PrometheusRule`` of the Prometheus operator."""
    groups = (DOCS / "../deploy/prometheus/alerts.yaml").read_text().partition("groups:\n")[2]
    return f"""# From deploy/prometheus/alerts.yaml, by `make reference`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: zeus-bso
spec:
  groups:
{re.sub("^(?=.)", "  ", groups, flags=re.MULTILINE)}"""


PAGES = {
    "settings.md": settings_page,
    "cli.md": commands_page,
    "http.md": routes_page,
    "../deploy/kubernetes/components/monitoring/prometheusrule.yaml": prometheus_rule,
}


def main() -> None:
    """Write all generated files."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())


if __name__ == "__main__":
    main()
