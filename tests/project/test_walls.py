"""Permitted imports (the rooms of the design), read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Set
from functools import cache

import pytest

from tests.support import ROOT

FRAMEWORKS = {"lightning", "pytorch_lightning", "torch", "transformers", "accelerate"}


def modules(*patterns: str) -> list[str]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert paths, f"no module matches {patterns}"
    return [str(path.relative_to(ROOT)) for path in paths]


def every(*patterns: str) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make a test of a requirement on each module; it reports all violations."""

    def decorate(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for module in modules(*patterns):
                try:
                    check(module)
                except AssertionError as failure:
                    failures.append(f"{module}: {failure}")
            assert not failures, "\n".join(failures)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@cache
def imports(module: str, *, at_run_time: bool = True) -> frozenset[str]:
    """Return the dotted names of all imports at any place of the module, without imports for types only."""
    tree = ast.parse((ROOT / module).read_text())
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if at_run_time and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            block.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where the walls are"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def offenders(names: Set[str], forbidden: set[str]) -> set[str]:
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in forbidden)}


def own(names: Set[str]) -> set[str]:
    return offenders(names, {"bso_server", "zeus_plugins"})


def test_reader_of_imports_handles_indentation() -> None:
    assert "bso_server.storage.migrations" in imports("bso_server/storage/store.py")
    assert "pynvml" in imports("zeus_plugins/energy/nvml.py")


@every("zeus_plugins/**/*.py")
def test_training_side_does_not_import_the_server(module: str) -> None:
    names = offenders(imports(module), {"bso_server"})
    is_the_server = module == "zeus_plugins/client/local.py"
    assert is_the_server or not names
    assert not offenders(imports(module), {"litestar", "sqlalchemy"})


def test_embedded_server_is_imported_only_by_the_client_and_on_demand() -> None:
    name = "zeus_plugins.client.local"
    assert [module for module in modules("zeus_plugins/**/*.py") if name in imports(module)] == [
        "zeus_plugins/client/connect.py"
    ]


@every("bso_server/**/*.py")
def test_server_imports_only_the_protocol_of_the_training_side(module: str) -> None:
    names = imports(module)
    assert offenders(names, {"zeus_plugins"}) == offenders(names, {"zeus_plugins.protocol"})


@pytest.mark.parametrize("module", modules("zeus_plugins/protocol/*.py"))
def test_protocol_imports_only_modules_of_the_protocol(module: str) -> None:
    names = imports(module)
    assert own(names) == offenders(names, {"zeus_plugins.protocol"})


@every("bso_server/core/**/*.py")
def test_core_is_pure(module: str) -> None:
    allowed = {"bso_server.core", "bso_server.errors", "zeus_plugins.protocol"}
    names = imports(module)
    assert own(names) == offenders(names, allowed)
    assert not offenders(
        names, {"asyncio", "httpx", "litestar", "logging", "os", "pydantic", "random", "sqlalchemy", "time"}
    )


ROOMS = {
    "storage": {"core", "errors"},
    "service": {"core", "errors", "storage"},
    "ui": {"core", "errors", "service"},
    "api": {"core", "errors", "service", "ui"},
    "metrics": {"core", "errors", "service"},
    "simulate": {"core", "errors"},
}


@pytest.mark.parametrize(("room", "may"), ROOMS.items())
def test_imports_run_in_a_single_direction(room: str, may: set[str]) -> None:
    allowed = {f"bso_server.{each}" for each in {room, *may}} | {"zeus_plugins.protocol"}
    for module in modules(f"bso_server/{room}/**/*.py"):
        names = imports(module)
        assert own(names) == offenders(names, allowed), module


GROUND_FLOOR = {"environment", "errors", "files", "placement", "protocol", "signals", "train_result"}
FLOORS = {
    **{module: set[str]() for module in sorted(GROUND_FLOOR)},
    "client": set[str](),
    "energy": set[str](),
    "power_limit": {"energy"},
    "training": {"client", "energy", "power_limit"},
}


@pytest.mark.parametrize(("floor", "may"), FLOORS.items())
def test_training_side_never_imports_a_higher_floor(floor: str, may: set[str]) -> None:
    allowed = {f"zeus_plugins.{each}" for each in {floor, *may, *GROUND_FLOOR}}
    for module in modules(f"zeus_plugins/{floor}.py", f"zeus_plugins/{floor}/**/*.py"):
        # The embedded server may import the server, but no part of the training side.
        names = {name for name in own(imports(module)) if name != "zeus_plugins" and not name.startswith("bso_server")}
        assert names == offenders(names, allowed), module


@pytest.mark.parametrize(
    ("names", "package", "users"),
    [
        ({"alembic", "sqlalchemy"}, "bso_server", ["storage/"]),
        ({"litestar"}, "bso_server", ["app.py", "api/"]),
        ({"jinja2", "markupsafe"}, "bso_server", ["ui/"]),
        # An embedded server shows no pages and has no metrics.
        ({"bso_server.ui"}, "bso_server", ["ui/", "api/dashboard.py", "cli/jobs.py", "cli/report.py"]),
        ({"bso_server.metrics"}, "bso_server", ["metrics/", "app.py", "cli/serve.py"]),
        ({"prometheus_client"}, "bso_server", ["metrics/"]),
        # The demo's training script is a user's script.
        (FRAMEWORKS, "zeus_plugins", ["dataloader/", "huggingface/", "lightning/", "demo/digits.py"]),
        ({"httpx", "httpcore"}, "zeus_plugins", ["client/http.py", "client/_transport.py"]),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else "",
)
def test_restricted_modules_are_imported_only_where_permitted(names: set[str], package: str, users: list[str]) -> None:
    may = tuple(f"{package}/{each}" for each in users)
    others = [module for module in modules(f"{package}/**/*.py") if not module.startswith(may)]
    assert {module: found for module in others if (found := offenders(imports(module), names))} == {}


@every("bso_server/api/*.py")
def test_handlers_leave_errors_to_a_single_table(module: str) -> None:
    tries = any(isinstance(node, ast.Try) for node in ast.walk(parsed(module)))
    assert not tries or module == "bso_server/api/requests.py"


@every("zeus_plugins/power_limit/plan.py", "zeus_plugins/power_limit/selectors.py")
def test_decisions_on_power_limits_are_pure(module: str) -> None:
    allowed = {f"zeus_plugins.{each}" for each in ("energy.cluster", "energy.monitor", "errors", "protocol")}
    allowed |= {f"zeus_plugins.power_limit.{each}" for each in ("profile", "selectors")}
    names = imports(module)
    assert own(names) == offenders(names, allowed)
    assert not offenders(names, {"logging", "os", "subprocess", "threading", "time"})


# Private parts of a framework are used in one module.
@every("zeus_plugins/lightning/*.py", "zeus_plugins/huggingface/*.py")
def test_private_attributes_of_a_framework_are_used_in_a_single_module(module: str) -> None:
    if module.endswith("/_trainer.py"):
        return
    tree = parsed(module)
    private = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert not private


def test_modules_have_no_import_cycles() -> None:
    files = [*modules("zeus_plugins/**/*.py"), *modules("bso_server/**/*.py")]
    module_of = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}

    def needed_by(file: str) -> set[str]:
        names = {name for name in imports(file, at_run_time=False) if name in module_of}
        # An import of a module from a package needs only this module, not the imports of the package's own file.
        return {module_of[name] for name in names if not any(other.rpartition(".")[0] == name for other in names)}

    needed = {file: needed_by(file) for file in files}
    in_circles = []
    for file in files:
        reached, left = set[str](), list(needed[file])
        while left:
            each = left.pop()
            if each not in reached:
                reached.add(each)
                left.extend(needed[each])
        if file in reached:
            in_circles.append(file)
    assert not in_circles
