"""Every shipped configuration is right as it is, and the schema for editors is current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from trainer import families
from trainer.cli import main
from trainer.cli.options import Layers
from trainer.config.writing.schema_json import json_schema

FOLDER = Path(__file__).resolve().parents[3] / "train_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
OVERLAYS = sorted(path for path in FOLDER.rglob("*.yaml") if path not in FILES)
COMPARED = ("llama_full_bf16.yaml", "llama_full_fp8.yaml")
"""Two that are there to be compared: they write what they differ in."""
MINE = "family: flux1_dev\ndata: {sets: [{img_dir: /data}]}\noutput_dir: /output/run\n"


def test_there_are_some() -> None:
    assert {"flux1_dev_lora.yaml", "flux1_dev_full.yaml", "quickstart.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES + OVERLAYS, ids=lambda file: file.name)
def test_loads_and_pleases_the_editor(file: Path, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8")
    first, _, _ = text.partition("\n")
    modeline = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert modeline is not None
    schema = json.loads((file.parent / modeline[1]).read_text(encoding="utf-8"))
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE)
    sources = Layers([mine, file]).load().sources.values()
    assert any(source.startswith(f"{file}:") for source in sources)
    jsonschema.validate(_as_editors_read(text), schema)


@pytest.mark.parametrize("file", OVERLAYS, ids=lambda file: file.name)
def test_every_value_of_an_overlay_says_why(file: Path) -> None:
    lines = [
        line for line in file.read_text(encoding="utf-8").splitlines() if re.match(r" +[a-z_]+: \S", line)
    ]
    assert lines and not [line for line in lines if " # " not in line]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_the_licence_of_the_base_model(file: Path) -> None:
    config = Layers([file]).load().config
    if config.model.download != "never":
        assert families.get(config.family).licence in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES + [one for one in OVERLAYS if one.parent.name == "hardware"], ids=str)
def test_profile_owned_keys_stay_commented_out(file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE)
    written = [
        key
        for key, source in Layers([mine, file]).load().sources.items()
        if key.startswith("features") and source != "default"
    ]
    assert written == (["features.compute"] if file.name in COMPARED else [])


def test_two_that_are_compared_differ_in_one_setting() -> None:
    """And from the one that leaves it to the plan."""
    names = ("llama_full.yaml", *COMPARED)
    auto, bf16, fp8 = (Layers([FOLDER / name]).load().config.model_dump() for name in names)
    assert [one["features"].pop("compute") for one in (auto, bf16, fp8)] == ["auto", "bf16", "fp8"]
    assert auto == bf16 == fp8
    # what is said of each key too, below what the file says of itself
    texts = [(FOLDER / name).read_text(encoding="utf-8").partition("\nfamily:")[2] for name in names]
    without = [[line for line in text.splitlines() if "  compute:" not in line] for text in texts]
    assert without[1] == without[2]
    assert [line for line in without[0] if line.startswith("  # ")] == [
        line for line in without[1] if line.startswith("  # ")
    ]


def test_the_editor_sees_mistakes() -> None:
    schema = json_schema(families.names())
    validator = jsonschema.Draft7Validator(schema)
    assert not list(validator.iter_errors({"train": None}))
    assert list(validator.iter_errors({"train": {"seeed": 1}}))
    assert list(validator.iter_errors({"family": "flux9"}))
    assert list(validator.iter_errors({"data": {"sets": [{"repeats": 2}]}}))


def test_every_key_is_described() -> None:
    schema = json_schema(families.names())
    tables = [schema, *schema["definitions"].values()]
    assert not [
        key for table in tables for key, field in table["properties"].items() if not field.get("description")
    ]


def test_schema_json_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    current = (FOLDER / "schema.json").read_text(encoding="utf-8")
    assert capsys.readouterr().out == current, "run: make docs"


def test_table_of_families_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--markdown"]) == 0
    current = (FOLDER.parent / "docs" / "families.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == current, "run: make docs"


def _as_editors_read(text: str) -> object:
    """YAML 1.2, where 1e-4 is a number."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver(  # type: ignore[attr-defined]
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+\Z"), list("-+.0123456789")
    )
    return yaml.load(text, Loader=loader)
