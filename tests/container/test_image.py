"""The built image: its users, folders, tools and files, and the layers that a rebuild makes again."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.container.conftest import SOMEBODY, Start
from tests.container.engine import Engine
from tests.container.images import ROOT, Source, build
from trainer import __version__
from trainer.container.appliance import GROUP, IMAGE_ENVIRONMENT, METRICS_PORT, RUNTIME_DIR, USER, VOLUMES

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

STEP = re.compile(r"^#(\d+) \[(.+?)\] (.*)$", re.MULTILINE)
DONE = re.compile(r"^#(\d+) (CACHED|DONE)", re.MULTILINE)


@pytest.fixture(scope="module")
def config(engine: Engine, cpu_image: str) -> dict[str, Any]:
    """The image's own `Config`, from `docker image inspect`."""
    (found,) = json.loads(engine.ask("image", "inspect", cpu_image))
    return dict(found["Config"])


def ask(start: Start, *command: str, user: str | None = f"{SOMEBODY}:{SOMEBODY}") -> tuple[int, str]:
    """Exit code and output of a program in the image, past the entrypoint."""
    box = start("-c", *command[:1], options=("--entrypoint", "/bin/sh"), user=user)
    return box.exit_code(), box.log()


def test_the_image_says_how_it_is_run(config: dict[str, Any]) -> None:
    environment = dict(text.split("=", 1) for text in config["Env"])
    assert environment.pop("PATH").startswith("/opt/trainer/venv/bin:")
    assert environment == {**IMAGE_ENVIRONMENT, "TRAINER_PROFILE": "cpu"}
    assert config["User"] == f"{USER}:{GROUP}"
    assert config["ExposedPorts"] == {f"{METRICS_PORT}/tcp": {}}
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "trainer", "health"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert not config["Volumes"], "a forgotten -v would be hidden"


def test_any_user_may_write_where_the_run_writes_and_nowhere_else(engine: Engine, cpu_image: str) -> None:
    # not read-only and without tmpfs: what the layers themselves allow
    folders = [volume.path for volume in VOLUMES if volume.access == "rw"] + [RUNTIME_DIR]
    files = " ".join(f"{folder}/x" for folder in folders)
    script = f"touch {files} && ! touch /opt/trainer/x 2>/dev/null && id -u"
    for user in (f"{USER}:{GROUP}", f"{SOMEBODY}:{GROUP}", f"{SOMEBODY}:{SOMEBODY}"):
        words = ("run", "--rm", "--network", "none", "--user", user, "--entrypoint", "/bin/sh", cpu_image)
        assert engine.ask(*words, "-ec", script).splitlines()[-1] == user.partition(":")[0]
    words = ("run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", cpu_image)
    listed = engine.ask(*words, "-ec", f"stat -c '%a %g' {' '.join(volume.path for volume in VOLUMES)}")
    for volume, line in zip(VOLUMES, listed.splitlines(), strict=True):
        mode, group = line.split()
        assert int(group) == GROUP
        assert bool(int(mode, 8) & 0o020) == (volume.access == "rw"), f"{volume.path}: {mode}"


def test_a_python_extension_compiles_and_loads(start: Start) -> None:
    """Triton compiles and imports such an extension at the first launch of a kernel."""
    source = '#include <Python.h>\\nstatic struct PyModuleDef m={PyModuleDef_HEAD_INIT,"m"};'
    source += "PyMODINIT_FUNC PyInit_m(void){return PyModule_Create(&m);}"
    script = f"""cd /tmp && printf '%b' '{source}' > m.c
        headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
        gcc -shared -fPIC "-I$headers" m.c -o m.so && python -c 'import m; print(m.__file__)'"""
    assert ask(start, script) == (0, "/tmp/m.so")


def test_the_build_leaves_no_tools_secrets_or_foreign_weights(start: Start) -> None:
    tools = "for tool in pip g++ cmake git; do ! command -v $tool; done; ! python -m pip"
    # what was mounted left its folder at most; a secret at most an empty file
    left = "find /mnt /run/secrets /etc/pip.conf /etc/apt/apt.conf.d/99secret -type f -size +0"
    weights = r"find / -xdev -type f -size +100k -regex '.*\.\(safetensors\|gguf\|pth?\|ckpt\)'"
    script = f"set -e; {{ {tools}; }} 2>/dev/null; {left} 2>/dev/null || true; echo then; "
    script += f"{weights} 2>/dev/null || true"
    code, text = ask(start, script)
    assert code == 0, text
    before, found = text.split("then\n")
    assert not before
    assert found, "the tiny base is shipped"
    assert all(path.startswith("/opt/trainer/assets/tiny-flux/") for path in found.split()), found


def test_torch_was_recorded_as_it_is(start: Start) -> None:
    code, text = ask(
        start, "cat $TRAINER_TORCH_FACTS && python -c 'import torch; print(torch.__version__)' 2>/dev/null"
    )
    assert code == 0, text
    recorded, version = text.rsplit("\n", 1)
    facts = json.loads(recorded)
    assert version.startswith(".".join(str(part) for part in facts["version"]))
    assert facts["cuda"] is None
    assert not facts["arch_list"]


def test_a_change_of_the_code_installs_nothing_again(
    engine: Engine, source: Source, cpu_image: str, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            _copy(line[1:], context)
    for name in (".dockerignore", "docker/Dockerfile"):
        _copy(name, context)
    code = context / "trainer" / "__init__.py"
    # the builder remembers earlier runs of this test
    code.write_text(code.read_text() + f"\n# changed: {uuid.uuid4()}\n")
    text = build(engine, source, target="cpu", tag="trainer:test-changed", context=context)
    before, after = layers(engine, cpu_image), layers(engine, "trainer:test-changed")
    engine.ask("rmi", "trainer:test-changed")
    # the last two are the package, and what is noted of torch with it
    assert before[:-2] == after[:-2], "a host that has the image pulls no dependency again"
    assert len(before) == len(after) and before[-2] != after[-2]
    outcomes = dict(DONE.findall(text))
    steps = {f"{stage} {what}": outcomes[number] for number, stage, what in STEP.findall(text)}
    again = sorted(name for name, outcome in steps.items() if outcome == "DONE")
    assert any(name.startswith("package ") and "COPY trainer" in name for name in again), text
    installing = [name for name in steps if "pip" in name and not name.startswith("package ")]
    assert len(installing) >= 2, text
    assert not set(installing) & set(again)
    kept = ("base ", "tools ", "dependencies-cpu ", "files ")
    assert not [name for name in again if name.startswith(kept) and " FROM " not in name]


def layers(engine: Engine, image: str) -> list[str]:
    """Digests of the image's layers, the lowest one first."""
    (found,) = json.loads(engine.ask("image", "inspect", image))
    return list(found["RootFS"]["Layers"])


def _copy(pattern: str, context: Path) -> None:
    for path in ROOT.glob(pattern):
        target = context / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, target)
