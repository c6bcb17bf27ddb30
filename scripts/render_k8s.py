"""Write the files under k8s/ that repeat others: kustomize reads nothing outside its own folder.

    python -m scripts.render_k8s

Takes train_configs/*.yaml, which k8s/base/kustomization.yaml lists, and rules and dashboard of
compose/monitoring; a test holds the results equal.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = Path("k8s/base/train_configs")
KUSTOMIZATION = Path("k8s/base/kustomization.yaml")
MONITORING = Path("k8s/components/monitoring")
RULES_SOURCE = Path("compose/monitoring/rules/trainer.yaml")
DASHBOARD_SOURCE = Path("compose/monitoring/grafana/dashboards/trainer.json")
LEFT_OUT = ("machine",)
"""Groups of rules about nodes: in a cluster they would watch every node of it, which has rules for that."""

_LISTED = re.compile(rf"(?m)^( *- ){CONFIGS.name}/.*\n(?: *- {CONFIGS.name}/.*\n)*")
_RULE_HEAD = f"""\
# Written by scripts/render_k8s.py from {RULES_SOURCE}: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: trainer
spec:
"""


def rendered(root: Path) -> dict[Path, str]:
    """Text of every repeated file, and of the one that lists them, by its path relative to the repository at
    `root`."""
    configs = sorted((root / "train_configs").glob("*.yaml"))
    files = {CONFIGS / path.name: path.read_text() for path in configs}
    files[KUSTOMIZATION] = listing((root / KUSTOMIZATION).read_text(), [path.name for path in configs])
    files[MONITORING / "prometheusrule.yaml"] = _RULE_HEAD + _groups((root / RULES_SOURCE).read_text())
    files[MONITORING / DASHBOARD_SOURCE.name] = (root / DASHBOARD_SOURCE).read_text()
    return files


def listing(kustomization: str, names: Sequence[str]) -> str:
    """The text of a kustomization.yaml with these configurations in its list of them; all else is kept."""
    found = _LISTED.findall(kustomization)
    if len(found) != 1:
        raise SystemExit(f"{KUSTOMIZATION}: one list of {CONFIGS.name}/*.yaml expected, {len(found)} found")
    (start,) = found
    return _LISTED.sub("".join(f"{start}{CONFIGS.name}/{name}\n" for name in names), kustomization)


def _groups(rules: str) -> str:
    """The groups for a cluster, indented as they stand, so that their comments come along."""
    _, *groups = re.split(r"(?m)^(?=  - name: )", rules)
    kept = [group for group in groups if group.splitlines()[0].removeprefix("  - name: ") not in LEFT_OUT]
    return textwrap.indent("groups:\n" + "".join(kept).rstrip() + "\n", "  ")


def main() -> None:
    files = rendered(REPOSITORY)
    for stale in set((REPOSITORY / CONFIGS).glob("*")) - {REPOSITORY / path for path in files}:
        stale.unlink()
    for path, text in files.items():
        (REPOSITORY / path).parent.mkdir(parents=True, exist_ok=True)
        (REPOSITORY / path).write_text(text)
    print(f"wrote {len(files)} files")


if __name__ == "__main__":
    main()
