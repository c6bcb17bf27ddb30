"""A configuration written by `dump` loads to the same configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.reading.load import load
from trainer.config.schema import RunConfig
from trainer.config.writing.dump import dump
from trainer.errors import one_line

texts = st.text(min_size=1).filter(lambda text: re.search(r"\S", text) is not None)
# PyYAML writes some of these so that it reads something else
awkward = st.sampled_from(
    [
        "null",
        "~",
        "off",
        "1e-4",
        "- a",
        "a: b",
        "#x",
        "[V]",
        "'",
        '"',
        "é\u2028x",
        "a\nb",
        "/\x85",
        "a\rb",
        "@x",
    ]
)
# not the root of all folders, in which output and cache would lie; control characters are refused
names = st.text(min_size=1).filter(
    lambda text: text.strip() and one_line(text) == text and not set(text) <= set("/.")
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "config.yaml"


def reloaded(file: Path, text: str) -> RunConfig:
    file.write_bytes(text.encode())
    return load([file], family_defaults={"tiny": {}}, environ={}).config


def config(**sections: Any) -> RunConfig:
    base = {"family": "tiny", "model": {"pretrained_model_name_or_path": "m"}, "output_dir": "/out"}
    return RunConfig.model_validate(
        {**base, "data": {"sets": [{"img_dir": "/a"}, {"img_dir": "b"}]}, **sections}
    )


@given(
    prompts=st.lists(texts | awkward, max_size=3),
    rate=st.floats(0, 1, exclude_max=True),
    rank=st.integers(1, 1024),
    learning_rate=st.floats(0, 1, exclude_min=True),
    switch=st.sampled_from(["auto", True, False]),
    name=names | awkward.filter(lambda text: one_line(text) == text),
    word=st.none() | texts | awkward,
    targets=st.sampled_from(["attention", "off"]) | st.lists(texts, min_size=1, max_size=3),
)
def test_round_trip(
    file: Path,
    prompts: list[str],
    rate: float,
    rank: int,
    learning_rate: float,
    switch: object,
    name: str,
    word: str | None,
    targets: object,
) -> None:
    one = config(
        data={"sets": [{"img_dir": f"/{name}"}], "trigger_word": word, "caption_dropout_rate": rate},
        lora={"rank": rank, "target_modules": targets},
        train={"learning_rate": learning_rate},
        features={"tf32": switch},
        validation={"prompts": prompts},
    )
    text = dump(one)
    assert reloaded(file, text) == one
    assert dump(reloaded(file, text)) == text


@pytest.mark.parametrize(
    "one",
    [
        config(),
        config(method="full"),
        config(flow={"weighting_scheme": "logit_normal", "logit_mean": 0.5}),
        config(flow={"weighting_scheme": "mode", "mode_scale": -1e-7}),
        config(output_dir=Path("./~odd/x")),
        config(checkpoint={"resume_from_checkpoint": "a/b"}),
        config(data={"sets": [{"img_dir": "/a", "control_dir": ["/b, c", "/d]"]}]}),
        config(data={"sets": [{"chat_file": "/a.jsonl"}]}),
        config(data={"sets": [{"chat_file": "/a.jsonl", "columns": {"prompt": "a, b", "response": "c: d"}}]}),
        config(data={"sets": [{"dataset_info": "/a/dataset_info.json", "name": "x"}]}),
        config(
            validation={
                "prompts": ["one", "two"],
                "control_images": [["/a.png", "/b.png"], "/c.png"],
                "img_dir": "/e",
                "control_dir": "/f",
            }
        ),
    ],
)
def test_what_has_no_effect_is_left_out(file: Path, one: RunConfig) -> None:
    assert reloaded(file, dump(one)) == one
    assert ("lora:" in dump(one)) == (one.method == "lora")


def test_sources_stand_behind_the_values(file: Path) -> None:
    file.write_text(dump(config(validation={"prompts": ["a # b", "c"]})), encoding="utf-8")
    got = load([file], overrides=["train.seed=3"], family_defaults={"tiny": {}}, environ={})
    text = dump(got.config, got.sources)
    assert re.search(r"^  seed: 3 +# --set train\.seed$", text, re.M)
    assert re.search(rf"^  - 'a # b' +# {re.escape(str(file))}:\d+$", text, re.M)
    assert reloaded(file, text) == got.config
