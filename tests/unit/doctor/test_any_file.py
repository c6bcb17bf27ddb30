"""Whatever stands in a file: a report or a problem with a remedy, and nothing of a secret."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doctor_cases import DOCUMENTS, RULES, facts_of, sides
from trainer.doctor import ask
from trainer.doctor.report import as_json, lines

FACTS = facts_of("dgx-spark")
NAMES = ("a.yaml", "a.json", "a.sh", "Dockerfile", "a.txt", ".env", "a")
SECRET = "zq7secretzq7secret"
PARTS = [
    text
    for path in sorted([*RULES.glob("*.txt"), *DOCUMENTS.glob("*.txt")])
    for side in sides(path).values()
    for text in side.files.values()
]
"""Texts of all cases: what is cut out of them is nearly right."""
near = st.builds(
    lambda text, cuts: "".join(text[a % len(text) : b % len(text)] or text[:a] for a, b in cuts),
    st.sampled_from(PARTS),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), min_size=1, max_size=4),
)
letters = st.text(alphabet="aF 01:-[]{}\"'&*!|>%@`#~,?<=.\n\t\\$()\x85\u2028\x00", max_size=60)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["fp8", "services", "apiVersion", "kind", "zero_optimization", "stage", "env", "x"]
            )
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def survives(folder: Path, name: str, raw: bytes) -> None:
    file = folder / name
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
    report = ask.about_files([file], FACTS)
    assert report.documents or report.problems
    assert all(problem.where and problem.what and problem.remedy for problem in report.problems)
    assert all(one.what and "{" not in one.rule for one in report.findings)
    assert "\n".join(lines(report, translated=True)) and json.loads(as_json(report))


@pytest.mark.slow
@settings(max_examples=1000)
@given(name=st.sampled_from(NAMES), raw=st.binary(max_size=60) | letters.map(str.encode))
def test_any_file(folder: Path, name: str, raw: bytes) -> None:
    survives(folder, name, raw)


@pytest.mark.slow
@settings(max_examples=500)
@given(name=st.sampled_from(NAMES), text=near)
def test_any_file_that_is_nearly_one(folder: Path, name: str, text: str) -> None:
    survives(folder, name, text.encode())


@pytest.mark.slow
@settings(max_examples=500)
@given(name=st.sampled_from(("a.json", "a.yaml")), tree=trees)
def test_any_json(folder: Path, name: str, tree: object) -> None:
    survives(folder, name, json.dumps(tree).encode())


@pytest.mark.parametrize(
    "text",
    [
        "services: {a: {environment: {HF_TOKEN: SECRET, API_KEY: SECRET}}}\n",
        "services: {a: {environment: [HF_TOKEN=SECRET]}}\n",
        "FROM a\nENV HF_TOKEN=SECRET\nARG MY_PASSWORD=SECRET\nRUN git clone https://me:SECRET@host/x\n",
        "export WANDB_API_KEY=SECRET\ntorchrun x.py --hub_token SECRET --bf16 true --fp16 true\n",
        '{"zero_optimization": {"stage": 1}, "communication_data_type": "HF_TOKEN=SECRET", "x": "SECRET"}',
        "finetuning_type: full\nhub_token: SECRET\nhub_token: SECRET\nbf16: true\nfp16: true\n",
        "apiVersion: v1\nkind: Secret\ndata: {HF_TOKEN: SECRET}\nstringData: {token: SECRET}\n",
    ],
)
def test_no_secret_is_shown(tmp_path: Path, text: str) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(text.replace("SECRET", SECRET))
    report = ask.about_files([tmp_path / name for name in NAMES], FACTS)
    assert SECRET not in as_json(report)
    assert SECRET not in "\n".join(lines(report, translated=True))
    assert SECRET not in "\n".join(map(str, report.problems))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_large_files_take_no_time(tmp_path: Path) -> None:
    """A MiB of what each reader likes least is read in some seconds."""
    draw = random.Random(0)
    million = 1 << 20
    texts = {
        "a.sh": "$(" * (million // 2),
        "b.sh": "a \\ " * (million // 4),
        "c.json": "[" + "1," * 10_000 + "1]",
        "d.yaml": "- " * 1000 + "a",
        "Dockerfile": "RUN " + "pip install [ " * (million // 16),
        "e.txt": "".join(draw.choices("a=1 \n-", k=million)),
        "f.json": '{"a": "' + "\\u0041" * (million // 8) + '"}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text[:million])
    ask.about_files([tmp_path / name for name in texts], FACTS)
