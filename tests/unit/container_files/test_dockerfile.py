"""The Dockerfile, the bake file and .dockerignore agree with the tables and with each other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import trainer
from tests.unit.house.sources import ROOT
from trainer.container import appliance
from trainer.container.appliance import TARGETS

TEXT = (ROOT / "docker" / "Dockerfile").read_text()
BAKE = (ROOT / "docker" / "docker-bake.hcl").read_text()
PROFILES = list(TARGETS)
SECRETS = {"pip.conf", "ca.crt"}
KERNELS = {"rtx-4090", "hopper-fp8"}
"""Targets whose GPUs have kernels that are compiled on request."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of the Dockerfile; continued lines are joined."""

    name: str
    words: str


def stages() -> dict[str, tuple[str, list[Instruction]]]:
    """The base of each stage, and its instructions."""
    found: dict[str, tuple[str, list[Instruction]]] = {}
    lines = (line for line in TEXT.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    current = ""
    for text in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, words = text.partition(" ")
        if name == "FROM":
            base, current = words.split(" AS ")
            found[current] = (base, [])
        elif current:
            found[current][1].append(Instruction(name=name, words=" ".join(words.split())))
    return found


STAGES = stages()


def chain(stage: str) -> list[str]:
    """The stages that a stage is built on, the first one first."""
    base, _ = STAGES[stage]
    return [*(chain(base) if base in STAGES else []), stage]


def all_of(stage: str, name: str) -> list[str]:
    """The words of every instruction of this name that went into a stage."""
    return [one.words for part in chain(stage) for one in STAGES[part][1] if one.name == name]


def environment(stage: str) -> dict[str, str]:
    return dict(word.split("=", 1) for words in all_of(stage, "ENV") for word in shlex.split(words))


def test_there_is_a_target_for_every_profile_and_no_other() -> None:
    used = {base for base, _ in STAGES.values()} | set(re.findall(r"from=([\w-]+)", TEXT))
    ends = [stage for stage in STAGES if stage not in used and not stage.startswith("kernels-")]
    assert sorted(ends) == sorted(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_target_only_names_its_profile(profile: str) -> None:
    base, instructions = STAGES[profile]
    assert base == {"cpu": "runtime-cpu"}.get(
        profile, "runtime-kernels" if profile in KERNELS else "runtime-cuda"
    )
    assert instructions == [Instruction(name="ENV", words=f"TRAINER_PROFILE={profile}")]
    assert ("dependencies-cpu" if profile == "cpu" else "dependencies-cuda") in chain(profile)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_target_is_what_the_table_says(profile: str) -> None:
    found = environment(profile)
    assert found.pop("PATH").startswith(f"{appliance.PREFIX}/venv/bin:")
    assert found == {**appliance.IMAGE_ENVIRONMENT, "TRAINER_PROFILE": profile}
    assert all_of(profile, "USER")[-1] == f"{appliance.USER}:{appliance.GROUP}"
    assert all_of(profile, "EXPOSE") == [str(appliance.METRICS_PORT)]
    assert all_of(profile, "STOPSIGNAL") == ["SIGTERM"]
    assert all_of(profile, "ENTRYPOINT") == ['["/usr/bin/tini", "--", "/usr/local/bin/entrypoint.sh"]']
    assert all_of(profile, "WORKDIR") == [appliance.PREFIX]
    assert not all_of(profile, "VOLUME") + all_of(profile, "CMD")
    (health,) = all_of(profile, "HEALTHCHECK")
    assert health.endswith('CMD ["trainer", "health"]')


def test_folders_are_those_of_the_table() -> None:
    (script,) = [one.words for one in STAGES["base"][1] if one.words.startswith("mkdir ")]
    made, opened = re.search(r"mkdir -p ([^;]+);", script), re.search(r"chmod 0777 ([^;]+);", script)
    assert made is not None and opened is not None
    paths = [volume.path for volume in appliance.VOLUMES]
    assert sorted(made[1].split()) == sorted([*paths, appliance.RUNTIME_DIR, appliance.PREFIX])
    writable = [volume.path for volume in appliance.VOLUMES if volume.access == "rw"]
    assert sorted(opened[1].split()) == sorted([*writable, appliance.RUNTIME_DIR])


def test_versions_are_those_of_the_package_and_of_the_pins() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = {
        "VERSION": trainer.__version__,
        "TORCH_VERSION": pins["torch"],
        "TORCHVISION_VERSION": pins["torchvision"],
    }
    for name, version in wanted.items():
        assert set(re.findall(rf"^ARG {name}=(.*)$", TEXT, re.MULTILINE)) == {version}
        assert re.findall(rf'^variable "{name}" {{ default = "([^"]*)" }}', BAKE, re.MULTILINE) == [version]


def test_an_argument_has_one_default_also_in_the_bake_file() -> None:
    defaults: dict[str, set[str]] = {}
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE):
        defaults.setdefault(name, set()).add(value.strip('"'))
    baked = dict(re.findall(r'^variable "(\w+)" { default = "([^"]*)" }', BAKE, re.MULTILINE))
    assert all(len(values) == 1 for values in defaults.values()), defaults
    shared = defaults.keys() & baked.keys() - {"WHEELS"}
    assert {"BASE_IMAGE", "CUDA_VERSION", "EXTRAS", "KERNELS", "TORCH_INDEX", "PIP_NO_INDEX"} <= shared
    assert {name: {baked[name]} for name in shared} == {name: defaults[name] for name in shared}


def test_optional_parts_exist() -> None:
    extras = re.search(r'^ARG EXTRAS="([^"]+)"', TEXT, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is not None and set(extras[1].split()) <= project["optional-dependencies"].keys()


def test_old_builders_and_builders_without_network_understand_it() -> None:
    assert not re.search(r"^# *syntax *=", TEXT, re.MULTILINE | re.IGNORECASE), "it would be pulled"
    assert "<<" not in TEXT
    for option in ("--link", "--parents", "--exclude", "--start-interval"):
        assert option not in TEXT


def test_only_base_images_come_from_outside() -> None:
    outside = {base for base, _ in STAGES.values()} - STAGES.keys()
    assert outside == {"${BASE_IMAGE}", "scratch", "kernels-${KERNELS}"}
    assert {"kernels-none", "kernels-build"} <= STAGES.keys()
    assert not re.search(r"https?://", TEXT + BAKE)


def test_pip_may_be_given_secrets_and_no_argument_is_one() -> None:
    for stage, (_, instructions) in STAGES.items():
        for words in (one.words for one in instructions if one.name == "RUN"):
            if "--find-links" in words:
                assert set(re.findall(r"--mount=type=secret,id=([\w.]+)", words)) == SECRETS, stage
    assert not re.search(r"^ARG \w*(TOKEN|PASSWORD|SECRET|KEY)", TEXT, re.MULTILINE)


def moved(script: str, folder: Path, *paths: str) -> str:
    """A script of the Dockerfile with these paths below a folder."""
    for path in paths:
        script = script.replace(path, f"{folder}{path}")
        Path(f"{folder}{path}x").parent.mkdir(parents=True, exist_ok=True)
    return script


def test_an_authority_of_ones_own_is_trusted_beside_the_systems(tmp_path: Path) -> None:
    """The pip of the stage tools, written by its own line and run here."""
    (script,) = [one.words for one in STAGES["tools"][1] if "ensurepip" in one.words]
    system, own, both = "/etc/ssl/certs/ca-certificates.crt", "/run/secrets/ca.crt", "/dev/shm/ca.crt"
    script = moved(script[script.index("printf") :], tmp_path, system, own, both, "/mnt/tools/bin/")
    python = tmp_path / "mnt/tools/bin/python3"
    python.write_text('#!/bin/sh\necho "$@"; cat "${PIP_CERT:-/dev/null}"\n')
    python.chmod(0o755)
    subprocess.run(["/bin/sh", "-euc", script], check=True)
    (tmp_path / system[1:]).write_text("system\n")

    def pip() -> str:
        command = ["/bin/sh", str(tmp_path / "mnt/tools/bin/pip"), "install", "a b"]
        return subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout

    assert pip() == "-m pip install a b\n"
    (tmp_path / own[1:]).write_text("own\n")
    assert pip() == "-m pip install a b\nsystem\nown\n"
    # what is put together lies in no layer
    assert both.startswith("/dev/shm/")


@pytest.mark.parametrize(
    ("found", "index", "code", "says"),
    [
        ("torch-2.13.0+cpu", "", 0, ""),
        ("torch-2.13.0+cpu", "the-index", 0, ""),
        ("torch-2.13.0", "", 0, "note: this torch has CUDA's libraries"),
        ("torch-2.13.0", "the-index", 1, "error: TORCH_INDEX has no CPU build"),
    ],
)
def test_the_cpu_image_takes_any_torch_and_says_how_to_get_the_small_one(
    found: str, index: str, code: int, says: str, tmp_path: Path
) -> None:
    """Runs the image's own script, with a pip that finds one torch or the other."""
    script = next(one.words for one in STAGES["dependencies-cpu"][1] if "--dry-run" in one.words)
    script = moved(script[script.index("install=") :], tmp_path, "/mnt/tools/bin/", "/tmp/found")
    pip = tmp_path / "mnt/tools/bin/pip"
    answers = f'*--dry-run*) echo "Would install {found} x-1";; *) echo installed "$@"'
    pip.write_text(f'#!/bin/sh\ncase "$*" in {answers};; esac\n')
    pip.chmod(0o755)
    run = subprocess.run(
        ["/bin/sh", "-euc", script], env={"TORCH_INDEX": index}, capture_output=True, text=True
    )
    assert run.returncode == code, run.stderr
    lines = [line for line in (run.stdout + run.stderr).splitlines() if not line.startswith("Would")]
    if says:
        assert lines[0].startswith(says) and "TORCH_INDEX" in lines[0]
    assert len(lines) == bool(says) + (code == 0), "one line, and what pip says"
    if code == 0:
        assert lines[-1].startswith("installed ")
        assert ("--extra-index-url the-index" in lines[-1]) == bool(index)


def test_the_build_gets_what_it_copies_and_nothing_else() -> None:
    first, *rules = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    assert first == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    made = "assets/tiny-flux/make"
    assert rules.index(made) > rules.index("!assets/tiny-flux"), "what made the tiny base is in no image"
    assert (ROOT / made).is_dir()
    copied = [
        word.replace("*${WHEELS}", "build/wheels")
        for _, instructions in STAGES.values()
        for one in instructions
        if one.name == "COPY" and "--from=" not in one.words
        for word in [word for word in one.words.split() if not word.startswith("--")][:-1]
    ]
    # tests of the images have wheels of their own
    assert sorted({*copied, "build/test-wheels/*.whl"}) == sorted(allowed)
    assert all(list(ROOT.glob(path)) for path in copied if "*" not in path)


@pytest.mark.parametrize("target", TARGETS)
def test_the_bake_file_builds_the_target_for_its_platforms(target: str) -> None:
    block = re.search(rf'^target "{target}" {{\n(.*?)^}}', BAKE, re.MULTILINE | re.DOTALL)
    assert block is not None
    platforms = re.search(r"platforms = \[(.*)\]", block[1])
    assert platforms is not None
    assert tuple(re.findall(r'"([^"]+)"', platforms[1])) == TARGETS[target]
    assert re.search(r'target    = "([^"]+)"', block[1])[1] == target  # type: ignore[index]
    assert f'tags("{target}")' in block[1]


def test_the_bake_file_builds_all_targets_with_attestations() -> None:
    default = re.search(r'^group "default" {\n  targets = \[(.*)\]', BAKE, re.MULTILINE)
    assert default is not None and re.findall(r'"([^"]+)"', default[1]) == PROFILES
    assert 'attest = ["type=provenance,mode=max", "type=sbom"]' in BAKE
    given = set(re.findall(r"^ +(\w+) += \w+$", BAKE, re.MULTILINE))
    assert given - set(re.findall(r"^ARG (\w+)", TEXT, re.MULTILINE)) <= {"contexts", "secret"}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run(
        [str(hadolint), str(ROOT / "docker" / "Dockerfile")], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr
