"""A real Prometheus with our configuration watches a container that trains: every graph shows something.

Prometheus and the node exporter run beside the engine; of the configuration only the addresses change.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container.conftest import CACHE, mounts, starting
from tests.container.engine import Engine
from tests.container.images import ROOT
from tests.container.quickstart import words
from tests.ports import free_port
from tests.programs import program
from trainer.container.appliance import METRICS_PORT

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

MONITORING = ROOT / "compose" / "monitoring"
RULES = yaml.safe_load((MONITORING / "rules" / "trainer.yaml").read_text())["groups"]
# until two looks at the run, of which the second is 10 s after the first, and the rules after them
PATIENCE_SECONDS = 90.0
WITHOUT_ANSWER = {
    "DCGM_FI_DEV_FB_FREE": "dcgm-exporter needs a GPU",
    "DCGM_FI_DEV_FB_USED": "dcgm-exporter needs a GPU",
    "DCGM_FI_DEV_GPU_TEMP": "dcgm-exporter needs a GPU",
    "DCGM_FI_DEV_GPU_UTIL": "dcgm-exporter needs a GPU",
    "DCGM_FI_DEV_POWER_USAGE": "dcgm-exporter needs a GPU",
    "DCGM_FI_DEV_SM_CLOCK * 1e6": "dcgm-exporter needs a GPU",
    **dict.fromkeys(
        (
            'trainer_tokens_per_second{instance=~".+"} > 0',
            'trainer_learned_tokens_per_second{instance=~".+"} > 0',
            'trainer_tokens_total{instance=~".+"} > 0',
            'trainer_learned_tokens_total{instance=~".+"} > 0',
            'trainer_validation_perplexity{instance=~".+"} > 0',
            'trainer_validation_token_accuracy{instance=~".+"}',
        ),
        "the run learns from pictures (tests/e2e/test_conversations.py has one of texts)",
    ),
    'trainer_validation_score{instance=~".+"}': "the quickstart names no validation.metrics",
}
"""Queries that return nothing for the quickstart on a machine without GPU, and why."""


def boards() -> list[dict[str, Any]]:
    folder = MONITORING / "grafana" / "dashboards"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def dashboard_queries() -> dict[str, str]:
    """The query by "board: panel", for all instances; a board's choices are queries too."""
    found = {}
    for board in boards():
        chosen = [one for one in board["templating"]["list"] if one["type"] != "datasource"]
        for one in chosen:
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]["query"])
            assert asked is not None, "a choice is made among the values of a label"
            found[f"{board['title']}: ${one['name']}"] = f'{asked[1]}{{{asked[2]}!=""}}'
        for panel in board["panels"]:
            for target in panel["targets"]:
                text = target["expr"]
                for one in chosen:
                    text = text.replace(f"${one['name']}", one["allValue"])
                assert "$" not in text, text
                found[f"{board['title']}: {panel['title']} {target['refId']}"] = text
    return found


QUERIES = dashboard_queries()


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """A server that watches a run."""

    address: str
    log: Path
    began: float

    def get(self, what: str, **asked: str) -> Any:
        """The data of an answer of its API."""
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """The series of a query that have a value now: a graph shows no NaN."""
        return [one for one in self.get("query", query=query)["result"] if one["value"][1] != "NaN"]

    def wait_for(self, query: str) -> list[dict[str, Any]]:
        """Series of the query, as soon as there is one; none after the longest wait."""
        while not (found := self.series(query)) and time.monotonic() < self.began + PATIENCE_SECONDS:
            time.sleep(0.5)
        return found


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    """A server of this machine, that ends with the tests."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=log.parent, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def configure(folder: Path, addresses: dict[str, str]) -> Path:
    """A copy of Prometheus' configuration for the given addresses, and of the rules beside it."""
    shutil.copytree(MONITORING / "rules", folder / "rules")
    text = (MONITORING / "prometheus.yaml").read_text()
    for shipped, here in addresses.items():
        assert text.count(f'"{shipped}"') == 1
        text = text.replace(f'"{shipped}"', f'"{here}"')
    (folder / "prometheus.yaml").write_text(text)
    return folder / "prometheus.yaml"


def node_exporter(port: int) -> list[str]:
    """The command of monitoring.yaml; here it sees the machine without a mount."""
    service = yaml.safe_load((ROOT / "compose" / "monitoring.yaml").read_text())["services"]["node-exporter"]
    options = [word for word in service["command"] if not word.startswith("--path.")]
    name = program("prometheus-node-exporter", package="prometheus-node-exporter", folder=CACHE / "programs")
    return [name, *options, f"--web.listen-address=127.0.0.1:{port}"]


@pytest.fixture(scope="module")
def prometheus(
    engine: Engine, cpu_image: str, samples_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus server that watches a container, which trains as long as this module's tests take."""
    folder = tmp_path_factory.mktemp("prometheus")
    own, node = (f"127.0.0.1:{free_port()}" for _ in range(2))
    # held-out pictures and two processes: their loss and their times are on the dashboard
    held_out = ("validation.img_dir=examples/style-held-out", "validation.every_steps=1000000")
    command = words(1_000_000, "parallel.gpus=2", *held_out)
    published = ("-p", f"127.0.0.1::{METRICS_PORT}")
    options = (*mounts(cache=samples_cache), "--tmpfs", "/output:mode=1777", *published)
    storage = f"--storage.tsdb.path={folder / 'data'}"
    server = program("prometheus", package="prometheus", folder=CACHE / "programs")
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(starting(engine, cpu_image))(*command, options=options, network="bridge")
        box.wait_for(lambda: box.step() >= 2)
        stack.enter_context(running(node_exporter(int(node.rpartition(":")[2])), folder / "node.log"))
        addresses = {
            f"trainer:{METRICS_PORT}": box.address(METRICS_PORT),
            "node-exporter:9100": node,
            "localhost:9090": own,
        }
        where = (f"--config.file={configure(folder, addresses)}", f"--web.listen-address={own}")
        stack.enter_context(running([server, *where, storage], folder / "prometheus.log"))
        found = Prometheus(address=own, log=folder / "prometheus.log", began=time.monotonic())
        _wait_until_ready(found)
        yield found


def _wait_until_ready(server: Prometheus) -> None:
    url = f"http://{server.address}/-/ready"
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        assert time.monotonic() < server.began + PATIENCE_SECONDS, server.log.read_text()
        time.sleep(0.2)


def test_the_run_is_watched(prometheus: Prometheus) -> None:
    for job in ("trainer", "node", "prometheus"):
        found = prometheus.wait_for(f'up{{job="{job}"}} == 1')
        targets = prometheus.get("targets", state="active")["activeTargets"]
        assert len(found) == 1, {one["scrapeUrl"]: one["lastError"] for one in targets}


def test_every_rule_is_evaluated_and_none_is_about_a_healthy_run(prometheus: Prometheus) -> None:
    for rule in (rule for group in RULES for rule in group["rules"] if "record" in rule):
        assert prometheus.wait_for(rule["record"]), rule["record"]
    loaded = {group["name"]: group["rules"] for group in prometheus.get("rules")["groups"]}
    assert {name: len(rules) for name, rules in loaded.items()} == {
        group["name"]: len(group["rules"]) for group in RULES
    }
    problems = {rule["name"]: rule for rules in loaded.values() for rule in rules if rule["health"] != "ok"}
    assert not problems
    # those about machines are about the one that runs the tests
    assert not prometheus.series('ALERTS{alertname=~"Trainer.*"}')


@pytest.mark.parametrize("where", [where for where, query in QUERIES.items() if query not in WITHOUT_ANSWER])
def test_a_graph_has_something_to_show(prometheus: Prometheus, where: str) -> None:
    query = QUERIES[where]
    assert prometheus.wait_for(query), f"{where} is empty: {query}"


@pytest.mark.parametrize("query", WITHOUT_ANSWER)
def test_a_graph_that_is_left_out_is_on_a_dashboard_and_empty(prometheus: Prometheus, query: str) -> None:
    assert query in QUERIES.values(), "no dashboard asks for it"
    assert not prometheus.series(query), f"it has an answer: {WITHOUT_ANSWER[query]}"
