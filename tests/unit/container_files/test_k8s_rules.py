"""The rules that the manifests are held to speak when one is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.unit.container_files import k8s_damage
from tests.unit.container_files.k8s_damage import Damage
from tests.unit.container_files.k8s_files import Manifest, merged, one, plain, pod_spec
from tests.unit.container_files.k8s_rules import (
    admits,
    house,
    quantity_bytes,
    restricted,
    selects,
    unresolved,
)


@pytest.mark.parametrize(
    ("rule", "said", "damage"),
    [
        *((restricted, said, damage) for said, damage in k8s_damage.RESTRICTED.items()),
        *((house, said, damage) for said, damage in k8s_damage.HOUSE.items()),
    ],
)
def test_a_rule_finds_what_is_wrong(rule: Callable[[Manifest], list[str]], said: str, damage: Damage) -> None:
    job = copy.deepcopy(one(plain("cpu"), "Job"))
    assert not rule(job)
    damage(pod_spec(job))
    assert [what.removeprefix("trainer: ") for what in rule(job)] == [said]


@pytest.mark.parametrize(("said", "damage"), k8s_damage.UNRESOLVED.items())
def test_references_to_nothing_are_found(said: str, damage: Damage) -> None:
    manifests = copy.deepcopy(plain("cpu"))
    damage(pod_spec(one(manifests, "Job")))
    assert unresolved(manifests) == [said]


def test_a_deployments_account_and_what_a_binding_names_are_looked_for() -> None:
    account = {"kind": "ServiceAccount", "name": "someone"}
    binding = {"kind": "RoleBinding", "metadata": {"name": "a"}}
    binding |= {"roleRef": {"kind": "Role", "name": "all"}, "subjects": [account]}
    spec = {"serviceAccountName": "someone", "containers": [], "volumes": []}
    deployment = {"kind": "Deployment", "metadata": {"name": "b"}, "spec": {"template": {"spec": spec}}}
    assert unresolved([binding]) == ["Role all", "ServiceAccount someone"]
    assert unresolved([deployment]) == ["ServiceAccount someone"]
    there = [{"kind": kind, "metadata": {"name": name}} for kind, name in (("Role", "all"), account.values())]
    assert unresolved([binding, deployment, *there]) == []


def test_an_optional_secret_may_be_missing() -> None:
    manifests = copy.deepcopy(plain("cpu"))
    (volume,) = [volume for volume in pod_spec(one(manifests, "Job"))["volumes"] if "secret" in volume]
    assert not unresolved(manifests)
    volume["secret"]["optional"] = False
    assert unresolved(manifests) == ["Secret trainer-hf-token"]


@pytest.mark.parametrize(
    ("operator", "values", "label", "admitted"),
    [
        ("In", ["8", "9"], "9", True),
        ("In", ["8"], "9", False),
        ("In", ["8"], None, False),
        ("NotIn", ["8"], "9", True),
        ("NotIn", ["8"], None, True),
        ("Exists", [], None, False),
        ("DoesNotExist", [], None, True),
        ("Gt", ["7"], "10", True),
        ("Gt", ["7"], "7", False),
        ("Gt", ["7"], None, False),
    ],
)
def test_affinity_is_judged_as_the_scheduler_does(
    operator: str, values: list[str], label: str | None, admitted: bool
) -> None:
    expression = {"key": "major", "operator": operator, "values": values}
    impossible = {"matchExpressions": [{"key": "arch", "operator": "In", "values": ["s390x"]}]}
    terms = {"nodeSelectorTerms": [impossible, {"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    pod = {"kind": "Pod", "spec": {"affinity": affinity}}
    assert admits(pod, {} if label is None else {"major": label}) == admitted


def test_selectors_need_every_label() -> None:
    assert selects({"matchLabels": {"a": "1"}}, {"a": "1", "b": "2"})
    assert not selects({"matchLabels": {"a": "1", "b": "3"}}, {"a": "1", "b": "2"})


def test_entries_merge_by_name() -> None:
    under = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": ["x", "y"]}
    over = {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}], "args": ["z"]}
    both = merged(under, over)
    assert {entry["name"]: entry["value"] for entry in both["env"]} == {"A": "1", "B": "3", "C": "4"}
    assert both["args"] == ["z"]


def test_quantities_are_binary() -> None:
    assert (quantity_bytes("2Gi"), quantity_bytes("64Mi")) == (2 * 1024**3, 64 * 1024**2)
