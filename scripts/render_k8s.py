"""Write the files under k8s/ that repeat others: kustomize reads nothing outside its own folder.

    python -m scripts.render_k8s

Takes train_configs/*.yaml, and rules and dashboard of compose/monitoring; a test holds the results equal.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = Path("k8s/base/train_configs")
MONITORING = Path("k8s/components/monitoring")
RULES_SOURCE = Path("compose/monitoring/rules/trainer.yaml")
DASHBOARD_SOURCE = Path("compose/monitoring/grafana/dashboards/trainer.json")
LEFT_OUT = ("machine",)
"""Groups of rules about nodes: in a cluster they would watch every node of it, which has rules for that."""

_RULE_HEAD = f"""\
# Written by scripts/render_k8s.py from {RULES_SOURCE}: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: trainer
spec:
"""


def rendered(root: Path) -> dict[Path, str]:
    """Text of every repeated file by its path, relative to the repository at `root`."""
    configs = sorted((root / "train_configs").glob("*.yaml"))
    files = {CONFIGS / path.name: path.read_text() for path in configs}
    files[MONITORING / "prometheusrule.yaml"] = _RULE_HEAD + _groups((root / RULES_SOURCE).read_text())
    files[MONITORING / DASHBOARD_SOURCE.name] = (root / DASHBOARD_SOURCE).read_text()
    return files


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
    print(f"wrote {len(files)} files; k8s/base/kustomization.yaml lists those of {CONFIGS}")


if __name__ == "__main__":
    main()
