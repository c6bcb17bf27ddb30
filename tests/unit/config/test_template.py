"""`trainer config template`: every key with its help, and a text that loads to the family's defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer import families
from trainer.cli import main
from trainer.cli.options import Layers
from trainer.config import fields
from trainer.config.schema import DataSet


def printed(family: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["config", "template", family]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("family", families.names())
def test_it_loads_to_the_defaults(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(printed(family, capsys))
    least = tmp_path / "least.yaml"
    one = (
        "chat_file: /data/chat.jsonl"
        if families.get(family).sample_kind == "conversation"
        else "img_dir: /data"
    )
    least.write_text(f"family: {family}\ndata: {{sets: [{{{one}}}]}}\noutput_dir: /output/{family}\n")
    assert Layers([template]).load().config == Layers([least]).load().config
    capsys.readouterr()


@pytest.mark.parametrize("family", families.names())
def test_every_key_is_there_below_its_help(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(family, capsys).splitlines()
    assert max(map(len, lines)) <= 110
    section, found = "", {}
    for number, line in enumerate(lines):
        if re.fullmatch(r"[a-z]+:", line):
            section = line[:-1]
        key = re.match(r"( *)(?:# )?([a-z_0-9]+):(?: |$)", line)
        if key is not None and len(key[1]) in (0, 2):
            name = f"{section}.{key[2]}" if key[1] else key[2]
            found[name] = lines[number - 1]
    assert set(fields.dotted_keys()) <= found.keys()
    assert not [key for key in fields.dotted_keys() if not found[key].lstrip().startswith("# ")]
    text = "\n".join(lines)
    assert not [key for key in DataSet.model_fields if f"{key}: " not in text]


def test_the_family_s_own_values_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("kandinsky5", capsys)
    assert "  rank: 32\n" in text and "  weighting_scheme: logit_normal\n" in text
    # what conversations have and images have not
    assert "  # max_new_tokens: 128\n" in text and "\n  resolution: " in text
    of_chat = printed("llama", capsys)
    assert "\n  max_new_tokens: 128\n" in of_chat and "\n  # resolution: 1024\n" in of_chat
    assert "\n  # weighting_scheme: none\n" in of_chat and "\n  # guidance_scale: 3.5\n" in of_chat
    # the plan decides features: they are told, and left to it
    assert "  # attention: auto\n" in text and "\n  attention: " not in text


def test_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "template", "flux1-dew"]) == 78
    assert 'FAMILY: unknown family "flux1-dew"' in (error := capsys.readouterr().err)
    assert "did you mean `flux1_dev`?" in error
