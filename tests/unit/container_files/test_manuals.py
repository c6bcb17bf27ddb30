"""DOCKER.md and the manuals in docs: what they name exists, and what they quote is printed."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from tests.unit.house.sources import ROOT, modules, tracked
from trainer.cli.commands import trainer as cli
from trainer.config.environment import VARIABLES
from trainer.config.schema import RunConfig
from trainer.container.appliance import SECRETS, TARGETS, VOLUMES
from trainer.telemetry.sinks.metrics import METRICS

MANUALS = [
    ROOT / name
    for name in (
        "DOCKER.md",
        "docs/cuda13.md",
        "docs/troubleshooting.md",
        "docs/memory.md",
        "docs/several-gpus.md",
        "docs/clusters.md",
    )
]
TROUBLES = ROOT / "docs/troubleshooting.md"
SEVERAL_GPUS = ROOT / "docs/several-gpus.md"
DOCKERFILE = ROOT / "docker/Dockerfile"
BAKE = ROOT / "docker/docker-bake.hcl"
FOREIGN_VARIABLES = {
    "MAX_RESTARTS",
    "DOCKER_BUILDKIT",
    "HTTPS_PROXY",
    "NCCL_DEBUG",
    "PWD",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SBATCH_GRES",
    "SSL_CERT_FILE",
    "TRANSFORMERS_CACHE",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "UID",
}
"""Variables of the shell, of other programs, or named because they must be removed."""
each_manual = pytest.mark.parametrize("manual", MANUALS, ids=lambda path: path.name)
PAGES = [
    *MANUALS,
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {*MANUALS, ROOT / "docs/benchmarks.md"}),
]
each_page = pytest.mark.parametrize("manual", PAGES, ids=lambda path: path.name)


TEMPLATES = {ROOT / "assets/tiny-flux/make/card.md"}
"""Texts that a program writes elsewhere, where their links lead."""
DOCUMENTS = [path for path in tracked() if path.suffix == ".md" and path not in TEMPLATES]


def prose(manual: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", manual.read_text(), flags=re.MULTILINE | re.DOTALL)


def blocks(manual: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", manual.read_text(), flags=re.MULTILINE | re.DOTALL)


def inline(manual: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(manual))


def commands(manual: Path) -> Iterator[list[str]]:
    """Commands of the manual's blocks as words, without the comments behind them; pipes part commands."""
    for block in blocks(manual, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a text over several lines: the block is parsed by bash elsewhere
                continue
            while words:
                while words and re.match(r"[A-Z_0-9]+=", words[0]):
                    del words[0]
                end = next((i for i, word in enumerate(words) if word in ("|", "&&")), len(words))
                yield words[:end]
                words = words[end + 1 :]


def slug(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(document: Path) -> list[str]:
    """Targets of the document's links into this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in map(slug, headings), link


def test_links_are_found() -> None:
    """The test above would pass were nothing looked for."""
    assert all(links(manual) for manual in MANUALS)
    assert {"docs/data.md#conversations", "docs/families.md"} <= {*links(ROOT / "README.md")}
    folders = {document.relative_to(ROOT).parent.as_posix() for document in DOCUMENTS}
    assert folders >= {".", "bench", "docs", "docs/adr"}


@each_manual
def test_every_section_is_in_the_list_of_contents(manual: Path) -> None:
    sections = re.findall(r"^## (.+)$", prose(manual), re.MULTILINE)
    contents = prose(manual).split("\n## ")[0]
    assert [name for name in sections if f"(#{slug(name)})" not in contents] == []


@each_manual
def test_blocks_are_shell(manual: Path) -> None:
    for block in blocks(manual, "sh"):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0, f"{block}\n{checked.stderr}"


_PATH = re.compile(
    r"^(?:\.\./)?((?:assets|compose|docker|docs|examples|k8s|scripts|tests|train_configs|trainer)/[\w./*-]+)"
)


def repository_paths(manual: Path) -> set[str]:
    words = {word for command in commands(manual) for word in command}
    words |= {word for text in inline(manual) for word in text.split()}
    return {found[1].rstrip("./") for word in words if (found := _PATH.match(word))}


@each_manual
def test_paths_exist(manual: Path) -> None:
    found = repository_paths(manual)
    assert found
    assert [path for path in sorted(found) if not list(ROOT.glob(path))] == []


def test_paths_are_found() -> None:
    """The test above would pass were nothing looked for."""
    found = repository_paths(ROOT / "DOCKER.md")
    assert {
        "compose/rtx-4090.yaml",
        "k8s/overlays/hopper-fp8",
        "scripts/setup_host.sh",
        "docker/Dockerfile",
    } <= found


def trainer_words(command: list[str]) -> list[str] | None:
    """The words that go to the trainer: of itself, of a container, or of a service of compose."""
    names = [
        i
        for i, word in enumerate(command)
        if re.match(r"trainer:\d", word)
        and command[max(0, i - 1)] not in ("-t", "-o")
        and "--image" not in word
    ]
    if command[:2] == ["docker", "run"] and names:
        return command[names[0] + 1 :]
    if command[:2] == ["docker", "exec"] and command[3:4] == ["trainer"]:
        return command[4:]
    if command[:2] == ["docker", "compose"] and "run" in command:
        return command[command.index("trainer") + 1 :]
    return command[1:] if command[:1] == ["trainer"] else None


def click_command(words: list[str]) -> tuple[click.Command, list[str]]:
    group, context = cli, click.Context(cli)
    command: click.Command = group
    rest = words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"trainer has no command {rest[0]}"
        command, rest = found, rest[1:]
    return command, rest


@each_page
def test_commands_of_the_trainer_exist_with_their_options(manual: Path) -> None:
    called = [words for command in commands(manual) if (words := trainer_words(command)) is not None]
    called += [text.split()[1:] for text in inline(manual) if text.startswith("trainer ")]
    for words in called:
        if words and words[0] == "...":
            continue
        command, rest = click_command(words)
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {
            "--help"
        }
        for word in rest:
            assert not word.startswith("-") or word.partition("=")[0] in known, f"trainer {' '.join(words)}"


def test_commands_are_found() -> None:
    called = [words for command in commands(ROOT / "DOCKER.md") if (words := trainer_words(command))]
    assert {words[0] for words in called} >= {"train", "fetch", "plan"}
    assert len(called) >= 10


@each_page
def test_make_targets_exist(manual: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"\bmake ([a-z][a-z-]*)\b", "\n".join([*blocks(manual, "sh"), *inline(manual)]))
    assert set(named) <= targets


@each_manual
def test_builds_name_targets_and_arguments_that_exist(manual: Path) -> None:
    dockerfile = DOCKERFILE.read_text()
    stages = set(re.findall(r"^FROM .+ AS ([\w-]+)$", dockerfile, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    for command in commands(manual):
        for option, value in itertools.pairwise(command):
            if option == "--target":
                assert value in stages, value
            if option == "--build-arg":
                assert value.partition("=")[0] in arguments, value
        if command[:3] == ["docker", "buildx", "bake"]:
            bake = BAKE.read_text()
            for name in (word for word in command[5:] if not word.startswith("-")):
                assert f'target "{name}"' in bake or f'group "{name}"' in bake, name


def test_arguments_have_the_defaults_that_are_listed() -> None:
    text = (ROOT / "DOCKER.md").read_text().split("| argument |", 1)[1].split("\n\n")[0]
    rows = [[cell.strip().strip("`") for cell in row.split("|")[1:3]] for row in text.splitlines()[2:]]
    assert len(rows) >= 5
    for name, default in rows:
        found = re.findall(rf"^ARG {name}=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
        assert found and {value.strip('"') for value in found} == {
            "" if default == "none" and not found[0] else default
        }


def test_the_offline_base_has_what_the_dockerfile_wants() -> None:
    wanted = re.findall(r'^ARG PACKAGES="([^"]+)"', DOCKERFILE.read_text(), re.MULTILINE)[0].split()
    line = next(block for block in blocks(ROOT / "DOCKER.md", "sh") if "docker commit" in block)
    assert {*wanted, "python3-venv"} <= set(re.findall(r"[\w.-]+", line))


@cache
def known_variables() -> frozenset[str]:
    compose = "\n".join(path.read_text() for path in (ROOT / "compose").glob("*.yaml"))
    manifests = {
        *(variable.name for variable in VARIABLES),
        *(f"{name}_FILE" for name in SECRETS),
        *re.findall(r"\$\{(\w+)", compose),
        *re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE),
        *re.findall(r'^variable "(\w+)"', BAKE.read_text(), re.MULTILINE),
        *FOREIGN_VARIABLES,
    }
    return frozenset(manifests)


@each_manual
def test_variables_exist(manual: Path) -> None:
    code = "\n".join(blocks(manual, "sh"))
    named = set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", code)) | set(
        re.findall(r"(?:^|\s)([A-Z][A-Z0-9_]+)=", code)
    )
    named |= {
        found[1]
        for text in inline(manual)
        if (found := re.match(r"^([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=\S*)?$", text))
    }
    named = {name for name in named if not name.startswith("TRAINER__")}
    assert named
    assert named <= known_variables(), named - known_variables()


@each_page
def test_keys_of_the_configuration_exist(manual: Path) -> None:
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    for text in [*inline(manual), *(word for command in commands(manual) for word in command)]:
        found = re.match(
            r"^(model|data|lora|train|flow|features|parallel|validation|checkpoint)\.([a-z_]+)(?:[=:].*)?$",
            text,
        )
        if found and not text.endswith((".yaml", ".json")):
            section: Any = sections[found[1]]
            assert found[2] in section.model_fields, text


@each_page
def test_metrics_exist(manual: Path) -> None:
    named = {text for text in inline(manual) if re.fullmatch(r"trainer_[a-z_]+", text)}
    assert named <= {metric.name for metric in METRICS}


# ---- troubleshooting


def entries() -> dict[str, str]:
    parts = re.split(r"^### (.+)$", TROUBLES.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_symptom_has_a_cause_and_a_remedy() -> None:
    assert len(entries()) >= 25
    for symptom, text in entries().items():
        assert re.search(r"^- cause: \S", text, re.MULTILINE), symptom
        assert re.search(r"^- do: \S", text, re.MULTILINE), symptom


def quotes() -> list[str]:
    """Messages quoted after `says:`, in whole lines of the page."""
    lines = [line.split("says:", 1)[1] for line in TROUBLES.read_text().splitlines() if "- says:" in line]
    return [
        (double or single).strip()
        for line in lines
        for double, single in re.findall(r"``(.+?)``|`([^`]+)`", line)
    ]


@cache
def printed() -> tuple[str, ...]:
    """All texts of each source file, with `…` for what is filled in; of the entrypoint, its own words."""
    found = []
    for path in modules():
        texts = []
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=values):
                    texts.append(
                        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in values)
                    )
        found.append("\n".join(texts))
    shell = (ROOT / "docker/entrypoint.sh").read_text()
    return (*found, re.sub(r"\$\{?\w+\}?", "…", shell))


def is_printed(quote: str) -> bool:
    """True if one file holds every piece of the quote, apart from the values filled in."""
    pieces = [piece for piece in quote.split("…") if piece.strip(" (),.:;")]
    assert max(map(len, pieces)) >= 10, f"too short to be told from others: {quote}"
    return any(all(piece in text for piece in pieces) for text in printed())


@pytest.mark.parametrize("quote", quotes(), ids=str)
def test_quoted_messages_are_printed(quote: str) -> None:
    assert is_printed(quote)


def test_quoted_messages_about_several_gpus_are_printed() -> None:
    said = table(SEVERAL_GPUS, "says")
    assert len(said) >= 8
    assert [quote for quote in said if not is_printed(quote)] == []


def test_other_messages_are_not() -> None:
    assert len(quotes()) >= 25
    assert not is_printed("the run does not fit: … wants … at most")


# ---- what was quoted of plans


def test_the_memory_page_quotes_the_plan() -> None:
    golden = (ROOT / "tests/golden/plans/dgx-spark.txt").read_text()
    (quoted,) = blocks(ROOT / "docs/memory.md", "text")
    lines = [line for line in quoted.splitlines() if line]
    assert len(lines) > 10
    assert [line for line in lines if line not in golden] == []


def test_the_cuda_page_quotes_errors() -> None:
    golden = (ROOT / "tests/golden/plans/driver-550-cuda-13-torch.txt").read_text()
    error = next(block for block in blocks(ROOT / "docs/cuda13.md", "text") if "550" in block)
    assert error in golden


# ---- tables


def table(manual: Path, heading: str) -> list[str]:
    """First column of the table whose header begins with `heading`, without its backticks."""
    text = manual.read_text().split(f"| {heading} |", 1)[1].split("\n\n")[0]
    return [row.split("|")[1].strip().strip("`") for row in text.splitlines()[2:]]


def test_tables_are_complete() -> None:
    docker = ROOT / "DOCKER.md"
    assert table(docker, "target") == list(TARGETS)
    for target, platforms in TARGETS.items():
        row = next(line for line in docker.read_text().splitlines() if line.startswith(f"| `{target}` |"))
        assert ", ".join(platforms) in row
    for heading, folder in (("overlay", "overlays"), ("component", "components")):
        there = sorted(path.parent for path in (ROOT / "k8s" / folder).glob("*/kustomization.yaml"))
        assert sorted(table(docker, heading)) == [path.relative_to(ROOT).as_posix() for path in there]


def test_runs_mount_our_volumes() -> None:
    ours = {volume.path: volume.access for volume in VOLUMES}
    mounts = [
        (found[1], found[2] or "rw")
        for command in commands(ROOT / "DOCKER.md")
        for option, value in itertools.pairwise(command)
        if option == "-v" and (found := re.fullmatch(r"[^:]+:([^:]+)(?::(ro))?", value))
    ]
    assert len(mounts) > 15
    assert {path: access for path, access in mounts if not path.startswith("/run/secrets/")} == {
        path: access for path, access in ours.items() if path != "/config"
    }


def test_layers_of_the_cpu_image_add_up() -> None:
    text = (ROOT / "DOCKER.md").read_text().partition("### Image sizes")[2].partition("### ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    sizes, compressed = ([float(row[column]) for row in rows] for column in (1, 2))
    whole = re.search(r"([\d.]+) GB,\s+([\d.]+) GB compressed", text)
    assert whole is not None and len(rows) == 5
    assert sum(sizes) == pytest.approx(1000 * float(whole[1]), rel=0.05)
    assert sum(compressed) == pytest.approx(1000 * float(whole[2]), rel=0.05)
    assert "estimate" in text
