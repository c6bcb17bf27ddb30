"""k8s/: what the Job says agrees with the code, in every overlay, as written and as kubectl renders it."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import yaml

from scripts.render_k8s import CONFIGS, KUSTOMIZATION, LEFT_OUT, RULES_SOURCE, listing
from scripts.render_k8s import rendered as repeated
from tests.ports import free_port
from tests.unit.container_files.k8s_files import (
    BASE,
    K8S,
    OVERLAYS,
    Manifest,
    container,
    environment,
    load,
    one,
    plain,
    pod_spec,
    rendered,
)
from tests.unit.container_files.k8s_rules import (
    admits,
    house,
    quantity_bytes,
    restricted,
    selects,
    unresolved,
)
from tests.unit.house.sources import ROOT
from trainer import __version__
from trainer.cli.commands import COMMANDS
from trainer.config.environment import VARIABLES, switch
from trainer.container.appliance import (
    GRACE_SECONDS,
    GROUP,
    IMAGE_ENVIRONMENT,
    METRICS_PORT,
    PREFIX,
    RUNTIME_DIR,
    TARGETS,
    USER,
    VOLUMES,
)
from trainer.errors import ExitCode
from trainer.machine.facts import Facts, facts_from_json
from trainer.machine.profiles import PROFILES
from trainer.planning.torch_and_driver import covering
from trainer.telemetry.status import BUDGET_SECONDS, HUNG_FACTOR, Phase, Verdict
from trainer.telemetry.supervising.server import serving

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MACHINES = ROOT / "tests/golden/machines"
RESUMABLE = {ExitCode.HUNG, ExitCode.STOPPED, ExitCode.PEER_LOST}
# capabilities that exist, by the architecture of the machines that they are in
GPUS = {
    "amd64": ((6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)),
    "arm64": ((7, 2), (7, 5), (8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
}
SPARK = ("arm64", (12, 1))


@pytest.fixture(
    params=[
        *(pytest.param((name, "plain"), id=name) for name in OVERLAYS),
        *(
            pytest.param((name, "kubectl"), id=f"{name}-kubectl", marks=pytest.mark.container)
            for name in OVERLAYS
        ),
    ]
)
def overlay(request: pytest.FixtureRequest) -> tuple[str, list[Manifest]]:
    """Name and manifests of each overlay."""
    name, source = request.param
    return name, plain(name) if source == "plain" else list(rendered(name))


@pytest.fixture
def manifests(overlay: tuple[str, list[Manifest]]) -> list[Manifest]:
    return overlay[1]


@pytest.fixture
def job(manifests: list[Manifest]) -> Manifest:
    return one(manifests, "Job")


def facts(machine: str) -> Facts:
    return facts_from_json((MACHINES / f"{machine}.json").read_text(), machine)


def node(architecture: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """Labels of a node, as the kubelet and NVIDIA's feature discovery set them."""
    gpu = {} if capability is None else dict(zip(("major", "minor"), map(str, capability), strict=True))
    return {"kubernetes.io/arch": architecture} | {
        f"nvidia.com/gpu.compute.{part}": value for part, value in gpu.items()
    }


def test_there_is_one_overlay_for_each_image() -> None:
    assert {path.name for path in (K8S / "overlays").iterdir()} == set(OVERLAYS) == set(PROFILES)


def test_an_overlay_takes_its_image_and_profile(overlay: tuple[str, list[Manifest]]) -> None:
    name, manifests = overlay
    job = one(manifests, "Job")
    assert container(job)["image"] == f"trainer:{__version__}-{name}"
    assert environment(job)["TRAINER_PROFILE"] == name


def test_variables_are_known_and_fit_the_profile(overlay: tuple[str, list[Manifest]]) -> None:
    name, manifests = overlay
    given = environment(one(manifests, "Job"))
    assert given.keys() <= {variable.name for variable in VARIABLES}
    unified = PROFILES[name].match.integrated is True
    assert (switch("UNIFIED_MEMORY", given) or False) == unified
    assert (switch("DISABLE_CPU_OFFLOAD", given) or False) == unified
    assert "HF_TOKEN" not in given, "a variable that holds a secret"


def test_the_token_comes_as_a_file_from_an_optional_secret(job: Manifest) -> None:
    (volume,) = [volume for volume in pod_spec(job)["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in container(job)["volumeMounts"] if mount["name"] == volume["name"]]
    folder, key = environment(job)["HF_TOKEN_PATH"].rsplit("/", 1)
    assert (volume["secret"]["optional"], mount["mountPath"], mount["readOnly"]) == (True, folder, True)
    told = f"create secret generic {volume['secret']['secretName']} --from-file={key}="
    assert told in (BASE / "kustomization.yaml").read_text()
    # readable for the group that the pod runs as, for nobody else
    assert volume["secret"]["defaultMode"] == 0o440


def test_the_command_trains_a_shipped_configuration_on_the_volumes(
    overlay: tuple[str, list[Manifest]],
) -> None:
    name, manifests = overlay
    command, config, *options = container(one(manifests, "Job"))["args"]
    assert command in COMMANDS
    (shipped,) = [m["data"] for m in manifests if m["kind"] == "ConfigMap"]
    assert shipped == {path.name: path.read_text() for path in (ROOT / "train_configs").glob("*.yaml")}
    chosen = yaml.safe_load(shipped[config.removeprefix("/config/")])
    folders = {
        folder for data in chosen["data"]["sets"] for folder in data.values() if isinstance(folder, str)
    }
    output = options[options.index("--output") + 1] if options else chosen["output_dir"]
    assert output.startswith("/output/")
    if name == "cpu":
        # in the image, below its working directory
        assert all((ROOT / folder).is_dir() and folder.startswith("examples/") for folder in folders)
        assert f"WORKDIR {PREFIX}\n" in (ROOT / "docker/Dockerfile").read_text()
    else:
        assert folders == {"/data"}


def test_a_job_fails_at_once_on_what_would_end_the_same_way_again(job: Manifest) -> None:
    disrupted, final, again = job["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    for rule, action, codes in (
        (final, "FailJob", set(ExitCode) - {ExitCode.OK} - RESUMABLE),
        (again, "Count", RESUMABLE),
    ):
        # the API server wants the values in order
        assert rule == {
            "action": action,
            "onExitCodes": {
                "containerName": container(job)["name"],
                "operator": "In",
                "values": sorted(code.value for code in codes),
            },
        }


def test_a_job_may_be_tried_again_but_never_twice_at_a_time(job: Manifest) -> None:
    spec = job["spec"]
    assert spec["backoffLimit"] >= 1
    assert (spec["completions"], spec["parallelism"], spec["podReplacementPolicy"]) == (1, 1, "Failed")


def test_a_pod_has_time_to_save(job: Manifest) -> None:
    grace = pod_spec(job)["terminationGracePeriodSeconds"]
    assert grace == GRACE_SECONDS == BUDGET_SECONDS[Phase.SAVE]


def test_probes_ask_the_port_of_the_metrics(job: Manifest) -> None:
    (port,) = container(job)["ports"]
    assert port["containerPort"] == METRICS_PORT
    assert "TRAINER_METRICS_PORT" not in environment(job)
    asked = {kind: container(job)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {
        "startup": {"path": "/healthz", "port": port["name"]},
        "liveness": {"path": "/healthz", "port": port["name"]},
        "readiness": {"path": "/readyz", "port": port["name"]},
    }


def test_the_supervisor_answers_what_probes_and_prometheus_ask(manifests: list[Manifest]) -> None:
    job, (endpoint,) = one(manifests, "Job"), one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == container(job)["ports"][0]["name"]
    probes = [container(job)[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    port = free_port()
    fine = Verdict(healthy=True, ready=True, reason="fine")
    with serving(port, metrics=lambda: "", health=lambda: fine):
        for path in {endpoint["path"], *(probe["httpGet"]["path"] for probe in probes)}:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                assert answer.status == 200


def test_the_supervisor_ends_a_hung_run_before_the_kubelet_does(job: Manifest) -> None:
    """A run is unhealthy after one budget of silence, and killed after HUNG_FACTOR budgets."""
    probe = container(job)["livenessProbe"]
    longest = (HUNG_FACTOR - 1) * max(BUDGET_SECONDS.values())
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) >= longest


def test_volumes_lie_where_the_image_has_them(job: Manifest) -> None:
    volumes = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
    mounts = {mount["name"]: mount for mount in container(job)["volumeMounts"]}
    for volume in VOLUMES:
        mount = mounts[volume.name]
        assert (mount["mountPath"], mount.get("readOnly", False)) == (volume.path, volume.access == "ro")
        if volume.name == "config":
            assert volumes["config"]["configMap"]["name"].startswith("trainer-config")
        else:
            assert volumes[volume.name]["persistentVolumeClaim"] == {"claimName": f"trainer-{volume.name}"}
    others = {mount["mountPath"] for name, mount in mounts.items()} - {volume.path for volume in VOLUMES}
    assert others == {RUNTIME_DIR, "/tmp", "/run/secrets/huggingface"}


def test_what_the_image_writes_lies_on_something_writable(job: Manifest) -> None:
    writable = [m["mountPath"] for m in container(job)["volumeMounts"] if not m.get("readOnly")]
    folders = [value for value in IMAGE_ENVIRONMENT.values() if value.startswith("/")]
    for folder in [folder for folder in folders if not Path(folder).is_relative_to(PREFIX)]:
        assert any(Path(folder).is_relative_to(mount) for mount in writable), folder


def test_memory_backed_folders_are_bounded(overlay: tuple[str, list[Manifest]]) -> None:
    _, manifests = overlay
    empty = {
        volume["name"]: volume["emptyDir"]
        for volume in pod_spec(one(manifests, "Job"))["volumes"]
        if "emptyDir" in volume
    }
    assert empty["run"]["medium"] == "Memory"
    assert all("sizeLimit" in volume for volume in empty.values())


def test_pods_are_restricted_and_run_as_the_image_does(job: Manifest) -> None:
    assert not restricted(job)
    assert not house(job)
    context = pod_spec(job)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, GROUP, GROUP)


def test_the_account_has_no_token(manifests: list[Manifest]) -> None:
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False


def test_references_resolve(manifests: list[Manifest]) -> None:
    assert not unresolved(manifests)


def test_selectors_take_the_pods(manifests: list[Manifest]) -> None:
    labels = one(manifests, "Job")["spec"]["template"]["metadata"]["labels"]
    assert selects(one(manifests, "PodMonitor")["spec"]["selector"], labels)
    assert selects(one(manifests, "NetworkPolicy")["spec"]["podSelector"], labels)
    assert one(manifests, "PodMonitor")["spec"]["jobLabel"] in labels


def test_the_network_lets_in_prometheus_and_out_names_and_https(manifests: list[Manifest]) -> None:
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (scrape,) = policy["ingress"]
    assert scrape["ports"] == [
        {"port": container(one(manifests, "Job"))["ports"][0]["name"], "protocol": "TCP"}
    ]
    assert scrape["from"]
    ports = [{(port["protocol"], port["port"]) for port in rule["ports"]} for rule in policy["egress"]]
    assert ports == [{("UDP", 53), ("TCP", 53)}, {("TCP", 443)}]
    assert all(rule["to"] for rule in policy["egress"]), "a rule without `to` allows everywhere"


def test_a_pod_goes_to_nodes_whose_gpu_the_profile_takes(overlay: tuple[str, list[Manifest]]) -> None:
    name, manifests = overlay
    job, match = one(manifests, "Job"), PROFILES[name].match
    wheels = {"amd64": facts("a100-80gb").torch, "arm64": facts("dgx-spark").torch}
    taken = set()
    for architecture, capabilities in GPUS.items():
        wheel = wheels[architecture]
        assert wheel is not None
        for capability in (None, *capabilities):
            fits = f"linux/{architecture}" in TARGETS[name]
            if PROFILES[name].device == "cuda":
                fits &= capability is not None and (
                    covering(wheel.arch_list, capability, compile_ptx=False) is not None
                    and (architecture, capability) != SPARK
                    if match.capabilities is None
                    else capability in match.capabilities
                )
            assert admits(job, node(architecture, capability)) == fits, (architecture, capability)
            taken |= {capability} if fits else set()
    assert taken


@pytest.mark.parametrize(
    ("machine", "takers"),
    [
        ("dgx-spark", {"dgx-spark", "cpu"}),
        ("rtx-4090", {"rtx-4090", "generic-cuda", "cpu"}),
        ("h200", {"hopper-fp8", "generic-cuda", "cpu"}),
        ("a100-80gb", {"generic-cuda", "cpu"}),
        ("too-old-gpu", {"cpu"}),
        ("cpu", {"cpu"}),
    ],
)
def test_recorded_machines_are_taken_by_the_right_overlays(machine: str, takers: set[str]) -> None:
    recorded = facts(machine)
    labels = node(
        ARCHITECTURES[recorded.architecture], recorded.gpus[0].capability if recorded.gpus else None
    )
    assert {name for name in OVERLAYS if admits(one(plain(name), "Job"), labels)} == takers


def test_gpu_profiles_ask_for_one_gpu(overlay: tuple[str, list[Manifest]]) -> None:
    name, manifests = overlay
    resources = container(one(manifests, "Job"))["resources"]
    count = 1 if PROFILES[name].device == "cuda" else None
    assert {resources[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")} == {count}
    tolerated = [taint["key"] for taint in pod_spec(one(manifests, "Job")).get("tolerations", ())]
    assert tolerated == (["nvidia.com/gpu"] if count else [])


def test_a_spark_is_asked_for_nearly_its_whole_budget() -> None:
    """The scheduler sees the request alone: the GPU takes its memory from the node's."""
    resources = container(one(plain("dgx-spark"), "Job"))["resources"]
    asked, limit = (quantity_bytes(resources[kind]["memory"]) for kind in ("requests", "limits"))
    total, profile = facts("dgx-spark").memory.total_bytes, PROFILES["dgx-spark"]
    assert profile.headroom_bytes is not None
    budget = min(total * profile.budget_share, total - profile.headroom_bytes)
    assert 0.9 * budget <= asked <= budget
    assert asked < limit <= total - profile.headroom_bytes


def test_nothing_goes_by_the_label_that_a_spark_has_not() -> None:
    files = [path for path in K8S.rglob("*") if path.is_file()]
    assert files and not [path for path in files if "nvidia.com/gpu.memory" in path.read_text()]


def test_repeated_files_are_up_to_date() -> None:
    expected = repeated(ROOT)
    assert {path: (ROOT / path).read_text() for path in expected} == expected, "python -m scripts.render_k8s"
    listed = load(BASE / "kustomization.yaml")[0]["configMapGenerator"][0]["files"]
    assert sorted(listed) == sorted(f"{CONFIGS.name}/{path.name}" for path in (ROOT / CONFIGS).iterdir())


def test_a_new_configuration_is_listed_and_the_rest_of_the_file_is_kept() -> None:
    text = (ROOT / KUSTOMIZATION).read_text()
    names = [path.name for path in sorted((ROOT / CONFIGS).iterdir())]
    written = listing(text, [*names, "zz_full.yaml"])
    last = f"      - {CONFIGS.name}/{names[-1]}\n"
    assert written == text.replace(last, f"{last}      - {CONFIGS.name}/zz_full.yaml\n")
    assert listing(written, names) == text
    with pytest.raises(SystemExit, match="one list of"):
        listing("resources: [job.yaml]\n", names)


def test_a_cluster_has_the_rules_about_runs() -> None:
    source = yaml.safe_load((ROOT / RULES_SOURCE).read_text())["groups"]
    (rule,) = load(K8S / "components/monitoring/prometheusrule.yaml")
    assert rule["spec"]["groups"] == [group for group in source if group["name"] not in LEFT_OUT]
    assert {group["name"] for group in source} > set(LEFT_OUT)
    assert "node_" not in str(rule) and "DCGM" not in str(rule)
