"""Rules, dashboards and Prometheus' configuration: valid, and about metrics that exist."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.house.sources import ROOT
from tests.unit.telemetry.test_records import record
from trainer.container.appliance import METRICS_PORT
from trainer.machine.profiles import PROFILES
from trainer.telemetry.sinks.metrics import METRICS, RunMetrics, build_registry
from trainer.telemetry.status import BUDGET_SECONDS, Phase, verdict
from trainer.telemetry.supervising.server import metrics_text
from trainer.telemetry.supervising.supervisor import Limits

MONITORING = ROOT / "compose" / "monitoring"
RULES = MONITORING / "rules" / "trainer.yaml"
RULE_TESTS = MONITORING / "rules" / "trainer_test.yaml"
PROMETHEUS = MONITORING / "prometheus.yaml"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
PROVISIONING = MONITORING / "grafana" / "provisioning"
GIB = 1024**3

# metrics, as far as they are used here, of the collectors that monitoring.yaml switches on
NODE_EXPORTER = {
    "node_cpu_seconds_total",
    "node_disk_read_bytes_total",
    "node_disk_written_bytes_total",
    "node_filesystem_avail_bytes",
    "node_filesystem_readonly",
    "node_filesystem_size_bytes",
    "node_memory_Cached_bytes",
    "node_memory_MemAvailable_bytes",
    "node_memory_MemTotal_bytes",
    "node_memory_SwapFree_bytes",
    "node_memory_SwapTotal_bytes",
}
# Of dcgm-exporter's default counters, without those that not every GPU has.
DCGM_EXPORTER = {
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_XID_ERRORS",
}
PROMETHEUS_ITSELF = {"ALERTS"}
TARGET_LABELS = {"job", "instance"}
FOREIGN_LABELS = {"alertstate", "device", "fstype", "gpu", "mode", "mountpoint"}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_:][\w:]*")
_NO_METRICS = {"and", "or", "unless", "bool", "offset", "Inf", "NaN"}


def metric_names(expression: str) -> set[str]:
    """The metrics of an expression: its words without labels, ranges, groupings, functions and operators."""
    text = _STRING.sub('""', expression)
    text = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", " ", text)
    text = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)", " ", text)
    names = set()
    for match in _WORD.finditer(text):
        is_number = match.start() > 0 and text[match.start() - 1].isdigit()
        if not is_number and not re.match(r"\s*\(", text[match.end() :]) and match[0] not in _NO_METRICS:
            names.add(match[0])
    return names


def label_matchers(expression: str) -> set[tuple[str, str, str]]:
    """(metric, label, value) of every label that an expression asks for."""
    found = set()
    for metric, labels in re.findall(r"([\w:]+)\{([^{}]*)\}", expression):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"', labels):
            found.add((metric, label, value))
    return found


def rule_groups() -> list[dict[str, Any]]:
    return list(yaml.safe_load(RULES.read_text())["groups"])


def rules() -> list[dict[str, Any]]:
    return [rule for group in rule_groups() for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def panels(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["panels"])


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of every rule and every panel."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]


def served(folder: Path) -> set[str]:
    """Names of the samples on /metrics of a run, and of what has no sample before a label is used."""
    measured = {"validation_loss": 1.0, "validation_perplexity": 2.0, "validation_token_accuracy": 0.5}
    RunMetrics(folder).record(dataclasses.replace(record(1), **measured))
    text = metrics_text(
        folder,
        version="0",
        child_up=True,
        verdict=verdict(None, 0.0),
        ranks=[None, None],
        first_rank=0,
        unified_memory=False,
        available=1,
    )
    text += generate_latest(build_registry("supervisor").collector).decode()
    names = set()
    for family in text_string_to_metric_families(text):
        names |= {sample.name for sample in family.samples}
        if not family.samples:
            names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names


def test_the_names_in_an_expression_are_found() -> None:
    expression = """
        sum by (job, le) (rate(a_total{b="c{d}", e=~"f|g"}[5m:1m])) / on (job) group_left () h:i:j > 1.5e9
        and ignoring(k) (l unless abs(m) == Inf) or time() - 2 * n offset 5m
    """
    assert metric_names(expression) - {"m5"} == {"a_total", "h:i:j", "l", "m", "n"}
    assert label_matchers('a{b="c", d=~"e|f"} + g{h!="i"}') == {
        ("a", "b", "c"),
        ("a", "d", "e|f"),
        ("g", "h", "i"),
    }


def test_every_query_is_about_metrics_that_exist(tmp_path: Path) -> None:
    ours = served(tmp_path)
    assert {"trainer_step", "trainer_step_seconds_bucket", "trainer_cache_entries_total"} <= ours
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = ours | recorded | NODE_EXPORTER | DCGM_EXPORTER | PROMETHEUS_ITSELF
    used = set()
    for where, expression in queries():
        names = metric_names(expression)
        assert names, where
        assert names <= known, f"{where} asks for {names - known}"
        used |= names
    assert NODE_EXPORTER | DCGM_EXPORTER | recorded <= used, "a name in these lists that nothing uses"


def test_every_label_that_is_asked_for_exists() -> None:
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for where, expression in queries():
        for metric, label, value in label_matchers(expression):
            allowed = TARGET_LABELS | labels.get(metric, FOREIGN_LABELS)
            assert label in allowed, f"{where}: {metric} has no label {label}"
            if label == "phase":
                assert set(value.split("|")) <= {phase.value for phase in Phase}, where


def test_all_metrics_of_a_run_are_shown_or_watched(tmp_path: Path) -> None:
    """A metric that nobody looks at is one too many, or a graph is missing."""
    shown = set().union(*(metric_names(expression) for _, expression in queries()))
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    unseen = {metric.name for metric in METRICS} - bare
    assert unseen == {"trainer_child_up"}, "it is 1 as long as there is somebody to ask"


def test_the_board_of_a_run_needs_no_exporter(tmp_path: Path) -> None:
    """Each query of the board has an answer on every machine, also without a GPU."""
    allowed = served(tmp_path) | PROMETHEUS_ITSELF
    for panel in panels(MONITORING / "grafana" / "dashboards" / "trainer.json"):
        for target in panel["targets"]:
            assert metric_names(target["expr"]) <= allowed, panel["title"]


def test_promtool_accepts_configuration_and_rules(promtool: str) -> None:
    checked = subprocess.run(
        [promtool, "check", "config", str(PROMETHEUS)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout


def test_every_rule_does_what_its_test_says(promtool: str) -> None:
    checked = subprocess.run(
        [promtool, "test", "rules", RULE_TESTS.name],
        cwd=RULE_TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def expected_alerts(tests: list[dict[str, Any]]) -> set[str]:
    """Names of the alerts that fire in rule tests: one that only pends, or is to be silent, is not."""
    asked = [one for test in tests for one in test.get("promql_expr_test", ())]
    texts = [one["expr"] + sample["labels"] for one in asked for sample in one["exp_samples"]]
    firing = [text for text in texts if 'alertstate="firing"' in text]
    found = {name for text in firing for name in re.findall(r'alertname="(\w+)"', text)}
    by_name = [one for test in tests for one in test.get("alert_rule_test", ())]
    return found | {one["alertname"] for one in by_name if one["exp_alerts"]}


def test_every_alert_is_expected_to_fire_by_a_rule_test() -> None:
    assert set(alerts()) <= expected_alerts(yaml.safe_load(RULE_TESTS.read_text())["tests"])


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"] in ({"severity": "warning"}, {"severity": "critical"}), name
        assert set(rule["annotations"]) == {"summary", "description"}, name
        assert re.search(r"\{\{ \$labels\.\w+ \}\}", rule["annotations"]["summary"]), f"{name}: where is it?"
        assert "job=" not in rule["expr"], f"{name}: jobs are called otherwise under Kubernetes"


def test_thresholds_are_those_of_the_supervisor() -> None:
    """An alert about memory comes before the supervisor acts, and one about steps after the slowest phase."""
    limits = Limits()
    (gib,) = re.findall(r"< (\d+) \* 1024\^3", alerts()["TrainerUnifiedMemoryLow"]["expr"])
    (profile,) = [profile for profile in PROFILES.values() if profile.match.integrated]
    assert profile.headroom_bytes is not None
    assert limits.soft_floor_bytes < int(gib) * GIB < profile.headroom_bytes
    for floor in (limits.soft_floor_bytes, limits.hard_floor_bytes):
        assert f"at {floor // GIB} GiB" in RULES.read_text()
    for name in ("TrainerUnifiedMemoryLow", "TrainerHostMemoryLow"):
        asked = {("trainer_supervisor_info", "unified_memory", "true")}
        assert label_matchers(alerts()[name]["expr"]) == asked
    (quiet,) = re.findall(r"seconds > (\d+) ", alerts()["TrainerNoProgress"]["expr"])
    assert int(quiet) >= max(BUDGET_SECONDS[phase] for phase in (Phase.TRAIN, Phase.FIRST_STEP))


def test_prometheus_asks_the_services_of_the_compose_file() -> None:
    content = yaml.safe_load(PROMETHEUS.read_text())
    found = yaml.safe_load((ROOT / "compose" / "monitoring.yaml").read_text())["services"]
    targets = {job["job_name"]: job.get("static_configs", [{}])[0] for job in content["scrape_configs"]}
    assert targets["trainer"] == {"targets": [f"trainer:{METRICS_PORT}"]}
    assert targets["node"] == {"targets": ["node-exporter:9100"]} and "node-exporter" in found
    (dcgm,) = [job for job in content["scrape_configs"] if job["job_name"] == "dcgm"]
    assert dcgm["dns_sd_configs"][0]["names"] == ["dcgm-exporter"] and "dcgm-exporter" in found
    assert "static_configs" not in dcgm, "a target that was never started would be down for ever"
    (mounted,) = [mount for mount in found["prometheus"]["volumes"] if "rules" in str(mount)]
    assert (ROOT / "compose" / mounted["source"]).resolve() == RULES.parent
    assert content["rule_files"] == [f"{Path(mounted['target']).name}/{RULES.name}"], "tests are no rules"


def test_grafana_finds_data_source_and_boards() -> None:
    found = yaml.safe_load((ROOT / "compose" / "monitoring.yaml").read_text())["services"]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in found
    assert source["isDefault"] is True
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "files.yaml").read_text())["providers"]
    mounts = {mount["target"]: ROOT / "compose" / mount["source"] for mount in found["grafana"]["volumes"]}
    assert mounts[provider["options"]["path"]].resolve() == DASHBOARDS[0].parent
    assert mounts["/etc/grafana/provisioning"].resolve() == PROVISIONING
    home = Path(found["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts[str(home.parent)] / home.name).is_file()


def test_boards_are_whole() -> None:
    assert [path.name for path in DASHBOARDS] == ["machine.json", "trainer.json"]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        names = {variable["name"] for variable in board["templating"]["list"]}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["targets"] and panel["title"]
            for target in panel["targets"]:
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= names
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells
