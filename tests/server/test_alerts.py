"""The files for Prometheus, Alertmanager and Grafana: rules, configurations, and the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.__main__ import PROJECT
from tests.support import ROOT
from tests.support.watching import scraped, trained, watched

PAGE = (ROOT / "docs" / "metrics.md").read_text()
ALERTS_PAGE = (ROOT / "docs" / "alerts.md").read_text()
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())

needs_promtool = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt-get install prometheus)"),
]


def queries() -> Iterator[str]:
    """Yield every query of the dashboard, with a duration instead of Grafana's variable."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m")


def test_dashboard_mixes_no_databases_and_shows_only_chosen_servers() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "namespace", "job", "instance"}
    for query in queries():
        asked = re.findall(r"\bzeus_bso_\w+(\{[^}]*)", query)
        assert asked
        assert all(each.startswith('{namespace=~"$namespace",job=~"$job",instance=~"$instance"') for each in asked), (
            query
        )
        assert len(re.findall(r"\b(?:max|sum)\b", query)) == len(
            re.findall(r"\b(?:max|sum) by \(cluster, namespace, job[,)]", query)
        )


def test_each_alert_names_its_section_of_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    base = "https://github.com/zeus-plugins/zeus-plugins/blob/main/docs/operations.md#"
    alerts = ALERTS.read_text()
    assert f"{PROJECT['urls']['Homepage']}/blob/main/docs/operations.md#" == base
    named = re.findall(r"- alert: (\w+)", alerts)
    assert re.findall(r"runbook_url: (\S+)", alerts) == [base + name.lower() for name in named]
    assert re.findall(r"^### (ZeusBso\w+)$", page, re.MULTILINE) == named


def promtool(*arguments: str | Path) -> str:
    command = [shutil.which("promtool") or "promtool", *arguments]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_every_queried_metric_exists(tmp_path: Path) -> None:
    asked = set(re.findall(r"\bzeus_bso_\w+", "\n".join([*queries(), ALERTS.read_text()])))
    assert len(asked) > 15
    async with watched(tmp_path, metrics_jobs="*", is_paid_back=True) as http:
        await trained(http)
        found = {name for name, _ in await scraped(http)}
        assert asked <= found


def test_dashboard_shows_every_documented_metric() -> None:
    described = set(re.findall(r"^\| `(zeus_bso_\w+)`", PAGE, re.MULTILINE)) - {"zeus_bso_unnamed_jobs"}
    shown = "\n".join(queries())
    names = [
        "saved_cost_joules",
        "job_energy_joules",
        "job_saved_energy_joules",
        "job_verdict",
        "job_stuck",
        "job_cost_change",
    ]
    only_alerted = {f"zeus_bso_{name}" for name in names}
    assert {name for name in described if name not in shown} <= only_alerted


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        left, top, width, height = (panel["gridPos"][name] for name in "xywh")
        cells = {(x, y) for x in range(left, left + width) for y in range(top, top + height)}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_documented_alerts_match_names_and_severities() -> None:
    written = re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", ALERTS.read_text(), re.DOTALL)
    described = re.findall(r"^\| `(ZeusBso\w+)` \| (\w+) \|", ALERTS_PAGE, re.MULTILINE)
    assert written == described


class TestPromtool:
    pytestmark = needs_promtool

    def test_alert_rules_fire_as_tested(self) -> None:
        assert "15 rules found" in promtool("check", "rules", "alerts.yaml")
        tests = sorted(PROMETHEUS.glob("alerts*_test.yaml"))
        assert promtool("test", "rules", *tests).count("SUCCESS") == len(tests) == 2
        tested = "".join(file.read_text() for file in tests)
        for name in re.findall(r"- alert: (\w+)", ALERTS.read_text()):
            assert re.search(rf"alertname: {name}\n\s+eval_time: \w+\n\s+exp_alerts:", tested), name

    def test_scrape_configuration_is_valid(self) -> None:
        assert "SUCCESS" in promtool("check", "config", "--syntax-only", "scrape.yaml")

    def test_every_query_of_the_dashboard_parses(self, tmp_path: Path) -> None:
        # As recording rules, which every version of promtool checks.
        rules = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(queries())]
        file = tmp_path / "rules.yaml"
        file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
        assert f"{len(rules)} rules found" in promtool("check", "rules", file)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("amtool") is None, reason="needs amtool (apt-get install prometheus-alertmanager)")
def test_documented_alertmanager_routes_each_severity(tmp_path: Path) -> None:
    (configuration,) = re.findall(r"```yaml\n(.*?)```", ALERTS_PAGE, re.DOTALL)
    file = tmp_path / "alertmanager.yml"
    file.write_text(configuration)

    def amtool(*arguments: str) -> str:
        command = [shutil.which("amtool") or "amtool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "SUCCESS" in amtool("check-config", str(file))
    receivers = {}
    for severity in ("critical", "warning", "info", "none"):
        labels = f"severity={severity}", "alertname=ZeusBsoDown"
        receivers[severity] = amtool("config", "routes", "test", f"--config.file={file}", *labels).strip()
    news = "slack,program"
    assert receivers == {"critical": "mail,slack,program", "warning": news, "info": news, "none": "program"}
    assert amtool("config", "routes", "test", f"--config.file={file}", "severity=none").strip() == "nobody"
