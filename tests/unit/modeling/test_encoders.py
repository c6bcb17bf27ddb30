"""Text encoders whose layers are quantised as they load: what they compute, what stays as it is, and how much
of them is ever in full precision.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextModel,
    LlamaForCausalLM,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
)

from trainer import families
from trainer.errors import AccessError
from trainer.modeling.base.load import build_structure, fill_structure, load_component
from trainer.modeling.base.source import ModelSource, fingerprint
from trainer.modeling.base.structure import Structure
from trainer.modeling.storage.layers import count_quantized
from trainer.planning.shapes.geometry import fp32_parameters, linear_weights, quantized_linears
from trainer.ways.storages import ENCODERS_FP32_IN_FP16, ENCODERS_KEEP

# rows of 64 values and more: bitsandbytes' CPU kernel unpacks shorter ones wrongly
_LAYERS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.03,
}
_TEXT = {**_LAYERS, "vocab_size": 40, "num_key_value_heads": 2, "pad_token_id": 0}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
CONFIGS: dict[Any, dict[str, Any]] = {
    CLIPTextModel: {**_LAYERS, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2},
    T5EncoderModel: {
        "vocab_size": 40,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "num_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    Mistral3ForConditionalGeneration: {
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**_LAYERS, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
        "image_token_index": 39,
    },
    Qwen2_5_VLForConditionalGeneration: {
        "text_config": {**_TEXT, "rope_scaling": ROPE},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "depth": 1,
            "num_heads": 4,
            "out_hidden_size": 64,
        },
        "tie_word_embeddings": True,
    },
    LlamaForCausalLM: {**_TEXT, "tie_word_embeddings": True},
}
CLASSES = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
BANDS = {"int8": 0.03, "nf4": 0.2}
"""Largest distance of embeddings from full precision, in units of their norm."""


@pytest.fixture
def encoder(tmp_path: Path) -> Callable[[Any], ModelSource]:
    """A base whose only component is a small model of a class."""

    def write(kind: Any) -> ModelSource:
        torch.manual_seed(0)
        model = kind(kind.config_class(**CONFIGS[kind]))
        model.save_pretrained(tmp_path / "text_encoder")
        return source(tmp_path)

    return write


def source(folder: Path, **changes: Any) -> ModelSource:
    plain = ModelSource(folder=folder, identity="x", revision=None, random_components=frozenset(), seed=0)
    return dataclasses.replace(plain, **changes)


def load(kind: Any, base: ModelSource, weights: str | None, dtype: torch.dtype = torch.float32) -> Any:
    base = dataclasses.replace(base, quantized_to=weights)
    return load_component(kind, base, "text_encoder", device="cpu", dtype=dtype)


def embeddings(model: Any) -> torch.Tensor:
    """The last hidden layer, which a pipeline would take."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[1, 5, 9, 33, 2]]), output_hidden_states=True)
    return found.hidden_states[-1].float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("weights", BANDS)
@CLASSES
def test_embeddings_are_near_those_in_full_precision(
    kind: Any, weights: str, encoder: Callable[[Any], ModelSource]
) -> None:
    base = encoder(kind)
    whole, quantized = load(kind, base, None), load(kind, base, weights)
    assert 0 < error(embeddings(quantized), embeddings(whole)) < BANDS[weights]
    assert not quantized.training
    assert not any(parameter.requires_grad for parameter in quantized.parameters())


@CLASSES
def test_the_layers_are_quantised_and_nothing_else(kind: Any, encoder: Callable[[Any], ModelSource]) -> None:
    base = encoder(kind)
    whole, quantized = load(kind, base, None), load(kind, base, "int8")
    modules = dict(quantized.named_modules())
    changed = {name for name, module in whole.named_modules() if type(module) is not type(modules[name])}
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters()}
    planned = quantized_linears(linear_weights(shapes), ENCODERS_KEEP)
    assert changed == set(planned)  # what the planner counts
    assert count_quantized(quantized, "int8")[0] == len(changed) >= 8
    others = {
        name: value for name, value in quantized.named_parameters() if name.rpartition(".")[0] not in changed
    }
    assert others
    assert all(torch.equal(value, whole.get_parameter(name)) for name, value in others.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@CLASSES
def test_streaming_gives_what_the_library_loads(
    kind: Any, dtype: torch.dtype, encoder: Callable[[Any], ModelSource]
) -> None:
    """Names of older files, tied matrices, tables, and what a class keeps in fp32 included."""
    base = encoder(kind)
    expected = kind.from_pretrained(base.folder / "text_encoder", dtype=dtype).state_dict()
    empty = build_structure(
        kind, base, "text_encoder", device="cpu", dtype=dtype, replace=lambda name, linear: None
    )
    found = fill_structure(empty).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in expected.items()
    }


def test_files_beside_each_other_are_read_as_the_library_reads_them(
    encoder: Callable[[Any], ModelSource],
) -> None:
    """Shards with an index, and other values in one file: which are loaded is not up to the storage."""
    base = encoder(T5EncoderModel)
    folder = base.folder / "text_encoder"
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    shard = "model-00001-of-00001.safetensors"
    save_file({name: 2 * value for name, value in tensors.items()}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plain, stored = (load(T5EncoderModel, base, weights) for weights in (None, "int8"))
    assert torch.equal(plain.shared.weight, tensors["shared.weight"])
    assert torch.equal(stored.shared.weight, plain.shared.weight)
    before = fingerprint(base.folder, ["text_encoder"], ())
    save_file({name: 3 * value for name, value in tensors.items()}, path, {"format": "pt"})
    assert fingerprint(base.folder, ["text_encoder"], ()) != before


@pytest.mark.parametrize("random", [frozenset(), frozenset({"text_encoder"})], ids=["files", "random"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_t5_whose_mlps_overflow_fp16_is_encoded_right_in_it(
    weights: str | None, random: frozenset[str], encoder: Callable[[Any], ModelSource]
) -> None:
    """T5-XXL has such a residual stream; in fp16 alone T5 clamps it, and the result is finite and wrong."""
    base = encoder(T5EncoderModel)
    (path,) = (base.folder / "text_encoder").glob("*.safetensors")
    save_file({name: value * (5e5 if ".wo." in name else 1) for name, value in load_file(path).items()}, path)
    base = dataclasses.replace(base, random_components=random)
    found = load(T5EncoderModel, base, weights, torch.float16)
    kept = {name for name, one in found.named_parameters() if one.dtype == torch.float32}
    assert kept == {f"encoder.block.{number}.layer.1.DenseReluDense.wo.weight" for number in range(2)}
    if not random:
        expected = embeddings(load(T5EncoderModel, base, None))
        assert error(embeddings(found), expected) < BANDS["int8"]


def test_the_planner_knows_what_encoders_keep_in_fp32(encoder: Callable[[Any], ModelSource]) -> None:
    for kind in CONFIGS:
        model = load(kind, encoder(kind), None, torch.float16)
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        kept = sum(one.numel() for one in model.parameters() if one.dtype == torch.float32)
        assert fp32_parameters(shapes, ENCODERS_FP32_IN_FP16) == kept
        assert bool(kept) == (kind is T5EncoderModel)


OLD_NAMES: dict[Any, tuple[tuple[str, str], ...]] = {
    CLIPTextModel: (("", "text_model."),),
    Mistral3ForConditionalGeneration: (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
    Qwen2_5_VLForConditionalGeneration: (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("lm_head.", "lm_head."),
    ),
}
"""Beginnings of names now, and as the published files have them."""


@pytest.mark.parametrize("kind", OLD_NAMES, ids=lambda kind: kind.__name__)
def test_files_of_older_versions_are_read(kind: Any, encoder: Callable[[Any], ModelSource]) -> None:
    base = encoder(kind)
    expected = load(kind, base, "int8").state_dict()
    tensors = {}
    for name, value in load(kind, base, None).named_parameters():
        now, old = next(pair for pair in OLD_NAMES[kind] if name.startswith(pair[0]))
        tensors[old + name.removeprefix(now)] = value.detach().clone()
    (path,) = (base.folder / "text_encoder").glob("*.safetensors")
    save_file(tensors, path)
    found = load(kind, base, "int8").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_files_may_hold_more_but_not_less(encoder: Callable[[Any], ModelSource]) -> None:
    base = encoder(T5EncoderModel)
    (path,) = (base.folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(path)
    save_file({**tensors, "decoder.final_layer_norm.weight": torch.ones(64)}, path)
    load(T5EncoderModel, base, "int8")
    del tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"]
    save_file(tensors, path)
    with pytest.raises(
        AccessError, match=r"1 tensor .* first encoder\.block\.1\.layer\.1\.DenseReluDense\.wo"
    ):
        load(T5EncoderModel, base, "int8")


@pytest.mark.parametrize("weights", [None, *BANDS])
@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_a_copy_without_the_head_encodes_as_one_with_it(
    is_tied: bool, weights: str | None, tmp_path: Path
) -> None:
    """transformers draws such a head at random; what encodes never computes it."""
    kind = Qwen2_5_VLForConditionalGeneration
    torch.manual_seed(0)
    config = kind.config_class(**{**CONFIGS[kind], "tie_word_embeddings": is_tied})
    kind(config).save_pretrained(tmp_path / "text_encoder")
    base = source(tmp_path)
    expected = embeddings(load(kind, base, weights))
    (path,) = (base.folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(path)
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    assert len(heads) == (0 if is_tied else 1)
    tensors = {name: one for name, one in tensors.items() if name not in heads}
    save_file(tensors, path, {"format": "pt"})
    found = load(kind, base, weights)
    assert torch.equal(embeddings(found), expected)
    assert not found.lm_head.weight.is_meta
    assert (found.lm_head.weight is found.get_input_embeddings().weight) == is_tied
    del tensors[next(name for name in tensors if name.endswith("model.norm.weight"))]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(AccessError, match=r"1 tensor .* in none of its files, first .*norm\.weight"):
        load(kind, base, weights)


@pytest.mark.parametrize("weights", BANDS)
@CLASSES
def test_a_random_encoder_is_drawn_quantised_and_alike_every_time(
    kind: Any, weights: str, encoder: Callable[[Any], ModelSource]
) -> None:
    base = dataclasses.replace(encoder(kind), random_components=frozenset({"text_encoder"}))
    first, again = load(kind, base, weights), load(kind, base, weights)
    other = load(kind, dataclasses.replace(base, seed=1), weights)
    assert count_quantized(first, weights)[0] >= 8
    assert torch.isfinite(embeddings(first)).all()
    assert torch.equal(embeddings(first), embeddings(again))
    assert not torch.equal(embeddings(first), embeddings(other))


@pytest.mark.parametrize("random", [frozenset(), frozenset({"text_encoder"})], ids=["files", "random"])
@pytest.mark.parametrize("weights", BANDS)
def test_one_layer_at_a_time_is_in_full_precision(
    weights: str,
    random: frozenset[str],
    encoder: Callable[[Any], ModelSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrices in bf16 that are alive whenever a layer gets its weight, without those that stay so."""
    base = dataclasses.replace(encoder(LlamaForCausalLM), random_components=random)

    def live() -> dict[int, torch.Size]:
        found = (item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
        found = (item for item in found if item.dtype is torch.bfloat16 and item.device.type == "cpu")
        matrices = [item for item in found if item.ndim == 2 and item.shape[1] > 1]
        return {matrix.untyped_storage().data_ptr(): matrix.shape for matrix in matrices}

    gc.collect()
    gc.freeze()  # what is there already is not looked at
    gc.disable()
    counts: list[int] = []

    def watched(
        self: Structure, name: str, rows: torch.Tensor, elsewhere: Mapping[str, str], **options: Any
    ) -> None:
        module = self.module.get_submodule(name.rpartition(".")[0])
        if rows.ndim == 2 and type(module) is not torch.nn.Linear and isinstance(module, torch.nn.Linear):
            counts.append(len([shape for shape in live().values() if shape[0] != 40]))
        place(self, name, rows, elsewhere, **options)

    place = Structure.place
    monkeypatch.setattr(Structure, "place", watched)
    try:
        load(LlamaForCausalLM, base, weights, torch.bfloat16)
    finally:
        gc.enable()
    assert len(counts) == 2 * 7
    assert max(counts) == 1


@pytest.mark.parametrize("family", ["flux1_dev", "flux2_dev", "kandinsky5", "qwen_image", "qwen_image_edit"])
def test_captions_are_encoded_alike_by_int8_encoders(family: str, tiny_base: Callable[[str], Path]) -> None:
    from PIL import Image

    one, base = families.get(family), source(tiny_base(family))
    controls = [Image.new("RGB", (64, 64), "red")] if one.text_sees_controls else []

    def encoded(weights: str | None) -> dict[str, torch.Tensor]:
        own = dataclasses.replace(base, quantized_to=weights)
        encoders = one.load_encoders("text", own, device="cpu", dtype=torch.float32, vae_tiling=False)
        return one.encode_text(encoders, "an apple", controls, prompt=False, max_sequence_length=16)

    expected, found = encoded(None), encoded("int8")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert 0 < error(found[name], value) < BANDS["int8"]
