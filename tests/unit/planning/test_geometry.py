"""Shapes from headers and from the committed table."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from scripts.make_geometry import compact
from trainer.config.schema import LoraSection
from trainer.errors import AccessError, ConfigError
from trainer.families import get
from trainer.files.component_shapes import Shapes, header_shapes, packed_size, packed_tensors, stored_as
from trainer.files.weight_files import weight_files
from trainer.planning.shapes.adapters import adapter_parameters
from trainer.planning.shapes.geometry import (
    TABLES,
    Role,
    linear_weights,
    quantized_linears,
    read_table,
    stored_component,
    table_component,
)

ROLES: dict[str, Role] = {
    "transformer": "trained",
    "text_encoder": "text_encoder",
    "text_encoder_2": "text_encoder",
    "vae": "vae",
}


def write_header(file: Path, shapes: Shapes) -> None:
    """A safetensors file without its data: the planner reads headers only."""
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_the_committed_table_is_flux1_dev() -> None:
    parts = {name: table_component("flux1_dev", name, role) for name, role in ROLES.items()}
    # 11.9 B; T5-XXL's encoder 4.76 B; CLIP-L's text model 123 M; the VAE 84 M
    assert parts["transformer"].parameters == 11_901_408_320
    assert parts["text_encoder_2"].parameters == 4_762_310_656
    assert parts["text_encoder"].parameters == 123_060_480
    assert parts["vae"].parameters == 83_819_683
    assert "committed table" in parts["vae"].source


def test_lora_and_int8_of_flux1_dev() -> None:
    shapes = read_table(TABLES / "flux1_dev.json")["transformer"]
    family = get("flux1_dev")
    width = 3072
    # 19 double blocks with 8 projections of attention, 38 single ones with 3
    expected = (19 * 8 + 38 * 3) * 16 * 2 * width
    linears, lora = linear_weights(shapes), LoraSection(rank=16)
    matches = re.compile(family.lora_targets["attention"]).fullmatch
    attention = {name: size for name, size in linears.items() if matches(name)}
    assert adapter_parameters(attention, lora) == expected
    queries = {name: size for name, size in linears.items() if name.endswith(".attn.to_q")}
    assert adapter_parameters(queries, LoraSection(rank=4)) == 57 * 4 * 2 * width
    sizes = quantized_linears(linear_weights(shapes), family.high_precision).values()
    parameters, rows = sum(out * into for out, into in sizes), sum(out for out, _ in sizes)
    # per double block: 8 projections and two MLPs of factor 4; per single block: 3 projections, MLP in,
    # output
    double = 8 * width**2 + 2 * 2 * 4 * width**2
    single = 3 * width**2 + 4 * width**2 + 5 * width**2
    assert parameters == 19 * double + 38 * single
    assert rows == 19 * (8 * width + 2 * 5 * width) + 38 * (3 * width + 4 * width + width)


def test_headers_of_all_shards_are_read(tmp_path: Path) -> None:
    write_header(tmp_path / "transformer/model-00001-of-00002.safetensors", {"a.weight": (2, 3)})
    write_header(tmp_path / "transformer/model-00002-of-00002.safetensors", {"b.weight": (4,)})
    write_header(tmp_path / "vae/model.safetensors", {"c.weight": (5, 1, 1, 1)})
    wanted: dict[str, Role] = {"transformer": "trained", "vae": "vae"}
    trained, vae = (stored_component(tmp_path, name, role, base="my/base") for name, role in wanted.items())
    assert trained.shapes == {"a.weight": (2, 3), "b.weight": (4,)}
    assert (trained.parameters, vae.parameters) == (10, 5)
    assert trained.source == "safetensors headers of my/base"


def test_a_component_without_files_is_named(tmp_path: Path) -> None:
    write_header(tmp_path / "transformer/model.safetensors", {"a.weight": (2, 3)})
    with pytest.raises(AccessError, match="no weights for vae"):
        stored_component(tmp_path, "vae", "vae")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 10) + b"not json!!"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(AccessError, match=r"model\.safetensors"):
        header_shapes(weight_files(tmp_path).files)


def test_compact_tables_lose_nothing(tmp_path: Path) -> None:
    shapes = {
        **{f"blocks.{index}.to_q.weight": (4, 4) for index in range(3)},
        "blocks.0.bias": (7,),
        "down.1.weight": (2, 2),
        "down.2.weight": (2, 2),
        "out.weight": (3, 4),
    }
    rows = compact(shapes)
    assert ("blocks.{i}.to_q.weight", [4, 4], 3) in rows
    (tmp_path / "t.json").write_text(json.dumps({"components": {"x": rows}}))
    assert read_table(tmp_path / "t.json")["x"] == shapes


def write_packed(folder: Path) -> None:
    """A linear of (6, 4) and its bias as bitsandbytes packs them, in two shards; one norm."""
    import torch
    from safetensors.torch import save_file

    from tests.quantized_layers import nf4_linear
    from tests.stored_nf4 import stored_state

    layer = nf4_linear(torch.nn.Linear(64, 6, dtype=torch.bfloat16))
    state = {f"a.{name}": value for name, value in stored_state(layer, torch.bfloat16).items()}
    first = {name: state.pop(name) for name in ("a.weight", "a.bias", "a.weight.absmax")}
    folder.mkdir()
    save_file({**first, "norm.weight": torch.zeros(4)}, folder / "m-1.safetensors")
    save_file(state, folder / "m-2.safetensors")


def test_packed_weights_have_their_true_shape(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    write_packed(folder)
    assert header_shapes(weight_files(folder).files) == {
        "a.weight": (6, 64),
        "a.bias": (6,),
        "norm.weight": (4,),
    }
    assert {name.removeprefix("a.weight") for name in packed_tensors(folder)["a"]} == {
        "",
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_state.bitsandbytes__nf4",
    }
    parameters, size = packed_size(folder)
    assert parameters == 6 * 64
    # packed values, scales, scale of the scales, two tables, and the text that states the shape
    assert 6 * 32 + 6 + 4 + 16 * 4 + 256 * 4 < size < 6 * 32 + 6 + 4 + 16 * 4 + 256 * 4 + 250


def test_packed_weights_that_are_incomplete_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    write_packed(folder)
    (folder / "m-1.safetensors").unlink()
    with pytest.raises(AccessError, match=r"no tensor a\.weight"):
        packed_tensors(folder)
    (folder / "m-2.safetensors").unlink()
    with pytest.raises(AccessError, match=r"no tensor \*\.quant_state\.bitsandbytes__nf4"):
        packed_tensors(folder)


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "load_in_4bit False"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type fp4"),
        ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage bfloat16"),
        ({"quant_method": "torchao"}, "quant_method torchao"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, quantization: object, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=rf"config\.json: .*{reason}"):
        stored_as(tmp_path)


def test_nf4_and_full_precision_are_told_apart(tmp_path: Path) -> None:
    from diffusers import BitsAndBytesConfig

    path = tmp_path / "config.json"
    path.write_text("{}")
    assert stored_as(tmp_path) == ""
    written = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
    for quantization in (NF4, written):
        path.write_text(json.dumps({"quantization_config": quantization}))
        assert stored_as(tmp_path) == "nf4"
