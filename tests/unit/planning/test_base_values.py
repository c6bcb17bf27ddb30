"""Values of a base's JSON files that are none of their key are told by file and key before anything loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planning.test_base_check import check, edited, loaded, plan
from trainer.errors import AccessError
from trainer.families import get
from trainer.planning.base_check import check_base

SCHEDULER = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("place", "changes", "words"),
    [
        (SCHEDULER, {"max_shift": "1.15"}, "scheduler: max_shift is '1.15', and a number is needed"),
        (SCHEDULER, {"max_image_seq_len": None}, "scheduler: max_image_seq_len is null, and 4096 in the"),
        (SCHEDULER, {"base_shift": float("nan")}, "base_shift is nan, and a finite number is needed"),
        (
            SCHEDULER,
            {"use_dynamic_shifting": "false"},
            "use_dynamic_shifting is 'false', and true or false is needed",
        ),
        ("transformer/config.json", {"guidance_embeds": "no"}, "guidance_embeds is 'no', and true or false"),
        ("vae/config.json", {"block_out_channels": [8, [16], 16]}, "of each of it: a number is needed"),
        ("vae/config.json", {"mid_block_add_attention": None}, "mid_block_add_attention is null, and True"),
        ("transformer/config.json", {"axes_dims_rope": [4, 6, 8]}, "18 and not attention_head_dim, 16"),
        ("transformer/config.json", {"axes_dims_rope": "GONE"}, "is left out, which are 128 and not att"),
        ("text_encoder/config.json", {"num_attention_heads": "GONE"}, "it does not say num_attention_heads"),
        ("text_encoder/config.json", {"return_dict": False}, "return_dict is False, and its outputs"),
        ("vae/config.json", {"block_out_channels": []}, "block_out_channels is [], and a list with values"),
        ("text_encoder/config.json", {"layer_norm_eps": 1e30}, "is 1e+30, and a norm's epsilon is small"),
        ("text_encoder/config.json", {"layer_norm_eps": None}, "layer_norm_eps is null, and 1e-05 in the"),
        ("text_encoder/config.json", {"eos_token_id": None}, "eos_token_id is None, and numbers of tokens"),
        ("text_encoder_2/config.json", {"num_heads": "GONE"}, "text_encoder_2: it does not say num_heads"),
        ("vae/config.json", {"scaling_factor": 0}, "scaling_factor is 0, and latents are scaled by numbers"),
        ("transformer/config.json", {"num_layers": 2**62}, "no model has more than 10,000 of them"),
    ],
)
def test_a_value_of_another_kind_is_told_by_the_plan(
    tiny_flux1_dev: Path, tmp_path: Path, place: str, changes: dict[str, Any], words: str
) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    edited(place, **changes)(base)
    with pytest.raises(AccessError) as caught:
        plan(base)
    assert words in str(caught.value)
    assert str(base / place) in str(caught.value)


def test_a_nested_value_is_told_by_its_whole_key(tiny_base: Callable[[str], Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    file = base / "text_encoder/config.json"
    content = json.loads(file.read_text())
    content["text_config"]["num_hidden_layers"] = 2**40
    content["text_config"]["rope_parameters"] = {}
    content["vision_config"] = 5
    content["text_config"]["rope_scaling"] = {
        "factor": -4.0,
        "rope_theta": True,
        "mrope_section": [16, 24, 24],
    }
    file.write_text(json.dumps(content))
    with pytest.raises(AccessError) as caught:
        plan(base, "qwen_image")
    said = str(caught.value)
    assert "text_encoder: text_config.num_hidden_layers is 1099511627776" in said
    assert "text_encoder: text_config.rope_parameters does not say rope_theta" in said
    assert "text_encoder: text_config.rope_scaling.factor is -4.0, and a number above 0 is needed" in said
    assert "text_config.rope_scaling.rope_theta is True, and a number above 0 is needed" in said
    assert "text_config.rope_scaling.mrope_section is [16, 24, 24], and a head has 16 values" in said
    assert "text_encoder: vision_config is 5, and a mapping is needed" in said


def test_a_head_whose_width_is_null_is_a_share_of_the_model(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Files of several libraries write `head_dim: null`, as they do what follows from other values."""
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    file = base / "text_encoder/config.json"
    content = json.loads(file.read_text())
    content["text_config"]["head_dim"] = None
    content["text_config"]["rope_scaling"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    file.write_text(json.dumps(content))
    plan(base, "qwen_image")


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ("GONE", "is left out, so that it is [16, 24, 24]"),
        (None, "is left out, so that it is [16, 24, 24]"),
        ({"rope_type": "default", "rope_theta": 1e6}, "is left out, so that it is [16, 24, 24]"),
        ({"rope_theta": 1e6, "mrope_section": None}, "is None"),
        ({"rope_theta": 1e6, "mrope_section": 8}, "is 8"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_rotary_sections_that_are_left_out_are_the_classs_own(
    tiny_base: Callable[[str], Path], tmp_path: Path, rope: object, said: str, flat: bool
) -> None:
    """They are of heads of 128 values; older files have the language model's keys beside the others."""
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    file = base / "text_encoder/config.json"
    content = json.loads(file.read_text())
    text = {key: one for key, one in content["text_config"].items() if key != "rope_parameters"}
    text |= {} if rope == "GONE" else {"rope_parameters": rope}
    rest = {key: one for key, one in content.items() if key != "text_config"}
    file.write_text(json.dumps(text | rest if flat else rest | {"text_config": text}))
    with pytest.raises(AccessError) as caught:
        plan(base, "qwen_image")
    whole = "rope_parameters.mrope_section" if flat else "text_config.rope_parameters.mrope_section"
    assert f"text_encoder: {whole} {said}, and a head has 16 values" in str(caught.value)
    text |= {"hidden_size": 256, "head_dim": 128}
    file.write_text(json.dumps(text | rest if flat else rest | {"text_config": text}))
    if rope in ("GONE", None):
        plan(base, "qwen_image")


def test_a_language_model_of_an_encoder_that_is_null_is_told(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    edited("text_encoder/config.json", text_config=None)(base)
    with pytest.raises(AccessError, match="text_encoder: 27 tensors of its files have another shape"):
        check(base, "qwen_image")


@pytest.mark.parametrize(
    ("family", "part", "key"),
    [
        ("qwen_image_edit", "vision_config", "num_heads"),
        ("qwen_image", "text_config", "num_attention_heads"),
        ("flux2_dev", "vision_config", "num_attention_heads"),
    ],
)
def test_a_nested_number_of_heads_that_is_left_out_is_told(
    tiny_base: Callable[[str], Path], tmp_path: Path, family: str, part: str, key: str
) -> None:
    """The class's default would split the same weights into other heads."""
    base = Path(shutil.copytree(tiny_base(family), tmp_path / "base"))
    file = base / "text_encoder/config.json"
    content = json.loads(file.read_text())
    del content[part][key]
    file.write_text(json.dumps(content))
    with pytest.raises(AccessError, match=f"text_encoder: it does not say {part}.{key}") as caught:
        plan(base, family)
    assert str(file) in str(caught.value)


def test_scales_of_other_channels_than_latents_are_told(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    edited("vae/config.json", latents_mean=[0.1, -0.2, 0.3], latents_std=[0.5, 0, 1, 1])(base)
    with pytest.raises(AccessError) as caught:
        plan(base, "qwen_image")
    assert "latents_mean has 3 values, and latents have 4 channels (z_dim)" in str(caught.value)
    assert "latents_std is [0.5, 0, 1, 1], and latents are scaled by numbers above 0" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token_id": {}}, "eos_token_id is {}, and numbers of tokens are needed"),
        ({"bos_token_id": float("nan")}, "bos_token_id is nan, and numbers of tokens"),
        ({"eos_token_id": [2, -5]}, "eos_token_id is [2, -5], and numbers of tokens"),
        ({"output_hidden_states": "false"}, "output_hidden_states is 'false', and true or false is needed"),
        ({"repetition_penalty": "x"}, "repetition_penalty is 'x', and a number is needed"),
    ],
)
def test_values_by_which_a_language_model_answers_are_told(
    tiny_base: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    base = Path(shutil.copytree(tiny_base("llama"), tmp_path / "base"))
    edited("generation_config.json", **changes)(base)
    with pytest.raises(AccessError) as caught:
        plan(base, "llama")
    assert words in str(caught.value)
    assert str(base / "generation_config.json") in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_image_seq_len": 256},  # as long as base_image_seq_len, so that it divides by zero
        {"shift": 0.0, "use_dynamic_shifting": False},  # every level is 0: nothing would be noised
        {"shift_terminal": 5},
    ],
)
def test_a_scheduler_that_gives_no_noise_levels_is_told(
    tiny_flux1_dev: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    edited(SCHEDULER, **changes)(base)
    with pytest.raises(AccessError, match=r"scheduler: its config (gives no noise levels|is not that of)"):
        check(base)


def test_a_scheduler_that_stretches_no_levels_passes(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("qwen_image"), tmp_path / "base"))
    edited(SCHEDULER, shift_terminal=None)(base)
    plan(base, "qwen_image")
    check(base, "qwen_image")


def test_a_tokenizer_that_its_library_refuses_without_a_class_of_error_is_told(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("qwen3"), tmp_path / "base"))
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["merges"][-1] = "x"
    (base / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(AccessError, match="AutoTokenizer cannot be opened"):
        check(base, "qwen3")


def test_a_processor_that_reads_no_picture_is_told(tiny_base: Callable[[str], Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_base("qwen_image_edit"), tmp_path / "base"))
    (file,) = (base / "processor").glob("*processor_config.json")
    content = json.loads(file.read_text())
    content["image_processor"]["image_mean"][1] = None
    file.write_text(json.dumps(content))
    with pytest.raises(AccessError, match=r"processor: \w+ cannot be opened"):
        check(base, "qwen_image_edit")


@pytest.mark.parametrize("changes", [{"head_dim": "x"}, {"sliding_window": []}])
def test_values_that_published_bases_leave_out_are_looked_at_too(
    tiny_base: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    base = Path(shutil.copytree(tiny_base("mistral"), tmp_path / "base"))
    edited("config.json", **changes)(base)
    with pytest.raises(AccessError, match="and a number is needed"):
        plan(base, "mistral")


@pytest.mark.parametrize("closed", ["", "vae", "tokenizer/tokenizer.json", "vae/config.json"])
def test_what_this_user_may_not_read_is_told(
    tiny_flux1_dev: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    real = os.access

    def access(path: Path, mode: int) -> bool:  # permission bits do not hold root
        return real(path, mode) and (path != tiny_flux1_dev / closed or mode == os.F_OK)

    monkeypatch.setattr(os, "access", access)
    for look in (plan, lambda base: check_base(get("flux1_dev"), loaded(base), base)):
        with pytest.raises(AccessError, match="this user may not read it") as caught:
            look(tiny_flux1_dev)
    assert caught.value.problems[0].where == str(tiny_flux1_dev / closed)
    assert "let this user read" in caught.value.problems[0].remedy


def test_a_last_token_that_the_model_does_not_know_is_told(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("mistral"), tmp_path / "base"))
    edited("tokenizer_config.json", eos_token="nope")(base)
    with pytest.raises(AccessError, match=r"it gives the token \d+, and the model knows \d+"):
        check(base, "mistral")


def test_a_token_for_padding_that_the_encoder_does_not_know_is_told(
    tiny_flux1_dev: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    edited("tokenizer/tokenizer_config.json", pad_token="nope")(base)
    with pytest.raises(AccessError, match=r"tokenizer: it gives the token \d+, and text_encoder knows \d+"):
        check(base)
