"""Components streamed from files: quantised as they arrive, stored in nf4 already; transformers' models."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.stored_nf4 import stored_state
from tests.unit.modeling.test_layers import CONFIG
from trainer.errors import AccessError, ConfigError
from trainer.files.component_shapes import header_shapes, packed_size
from trainer.files.weight_files import weight_files
from trainer.modeling.base import reading
from trainer.modeling.base.load import build_structure, fill_structure
from trainer.modeling.base.source import ModelSource
from trainer.modeling.base.structure import Structure
from trainer.modeling.blocks.recompute import recompute_blocks, repeated_blocks
from trainer.modeling.storage.layers import Replace, count_quantized, replacer
from trainer.ways.storages import find

INDEX = "model.safetensors.index.json"
KEEP = (r"proj_out", r"x_embedder", r".*norm.*")
LLAMA = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def source(folder: Path, *, random: frozenset[str] = frozenset()) -> ModelSource:
    return ModelSource(folder=folder, identity="x", revision=None, random_components=random, seed=0)


def load(
    kind: Any, base: ModelSource, name: str, dtype: torch.dtype, replace: Replace | None = None
) -> torch.nn.Module:
    return fill_structure(build_structure(kind, base, name, device="cpu", dtype=dtype, replace=replace))


def run(model: torch.nn.Module) -> torch.Tensor:
    """The transformer's output for fixed inputs."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(model.dtype)

    with torch.no_grad():
        return model(
            hidden_states=values(1, 4, 16),
            encoder_hidden_states=values(1, 3, 32),
            pooled_projections=values(1, 32),
            timestep=torch.tensor([0.5], dtype=model.dtype),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(3, 3),
            return_dict=False,
        )[0]


def shards(folder: Path, count: int) -> None:
    """Deal the one file's tensors out to several in turn, so that layers are parted."""
    (single,) = folder.glob("*.safetensors")
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(count):
        part = names[number::count]
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    """A base whose transformer has four shards in bf16."""
    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")
    shards(tmp_path / "transformer", 4)
    return tmp_path


def quantized(flux: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return load(FluxTransformer2DModel, source(flux), "transformer", dtype, replacer(find("nf4"), KEEP))


@pytest.fixture
def stored(flux: Path, tmp_path: Path) -> Path:
    """The same base quantised and written as diffusers writes it, in three shards."""
    folder = tmp_path / "packed" / "transformer"
    folder.mkdir(parents=True)
    state = stored_state(quantized(flux), torch.bfloat16)
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    shards(folder, 3)
    config = json.loads((flux / "transformer/config.json").read_text())
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ).to_dict()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return tmp_path / "packed"


def test_a_checkpoint_in_nf4_is_the_model_that_was_quantised(flux: Path, stored: Path) -> None:
    expected = quantized(flux)
    found = load(FluxTransformer2DModel, source(stored), "transformer", torch.bfloat16)
    assert count_quantized(found, "nf4")[0] == count_quantized(expected, "nf4")[0] > 10
    assert torch.equal(run(found), run(expected))
    state = found.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.parameters())


def test_what_is_stored_in_nf4_is_not_quantised_further(stored: Path) -> None:
    everything = replacer(find("nf4"), ())
    found = load(FluxTransformer2DModel, source(stored), "transformer", torch.bfloat16, everything)
    assert type(found.get_submodule("proj_out")) is torch.nn.Linear


def test_nf4_that_is_trained_in_another_type_is_unpacked_to_it(stored: Path) -> None:
    found = load(FluxTransformer2DModel, source(stored), "transformer", torch.float32)
    layer = found.get_submodule("transformer_blocks.0.attn.to_q")
    assert layer.bias.dtype == torch.float32
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert torch.isfinite(run(found)).all()


def test_the_planner_sees_true_shapes_of_a_stored_checkpoint(flux: Path, stored: Path) -> None:
    shapes = header_shapes(weight_files(stored / "transformer").files)
    assert shapes == header_shapes(weight_files(flux / "transformer").files)
    layers = [
        name for name, module in quantized(flux).named_modules() if type(module).__name__ == "Nf4Linear"
    ]
    parameters, size = packed_size(stored / "transformer")
    assert parameters == sum(torch.Size(shapes[f"{name}.weight"]).numel() for name in layers)
    assert parameters // 2 < size


def test_a_stored_checkpoint_that_lacks_a_tensor_is_told(stored: Path) -> None:
    folder = stored / "transformer"
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = "transformer_blocks.0.attn.to_q.weight.absmax"
    file = folder / index[name]
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)
    with pytest.raises(AccessError, match=name):
        load(FluxTransformer2DModel, source(stored), "transformer", torch.bfloat16)


def test_packed_weights_of_another_shape_are_told(stored: Path) -> None:
    path = stored / "transformer/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_attention_heads": 2}))
    with pytest.raises(AccessError, match=r"(is packed from|is) \(\d.*\), the model's is \(\d"):
        load(FluxTransformer2DModel, source(stored), "transformer", torch.bfloat16)


def test_other_quantisations_are_refused_when_loading(stored: Path) -> None:
    path = stored / "transformer/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot be trained on"):
        load(FluxTransformer2DModel, source(stored), "transformer", torch.bfloat16)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_one_layer_at_a_time_is_in_full_precision(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices in bf16 that are alive whenever a layer gets its weight, without those that stay so."""
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")

    def live() -> set[int]:
        found = (item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
        found = (item for item in found if item.dtype is torch.bfloat16 and item.device.type == "cpu")
        # int8's scales are matrices of one column
        matrices = [item for item in found if item.ndim == 2 and item.shape[1] > 1]
        return {matrix.untyped_storage().data_ptr() for matrix in matrices}

    gc.collect()
    gc.freeze()  # what is there already is not looked at
    gc.disable()
    counts: list[int] = []
    staying: set[int] = set()

    def watched(
        self: Structure, name: str, rows: torch.Tensor, elsewhere: Mapping[str, str], **options: Any
    ) -> None:
        if rows.ndim == 2:
            counts.append(len(live() - staying))
        place(self, name, rows, elsewhere, **options)
        module = self.module.get_submodule(name.rpartition(".")[0])
        if type(module) is torch.nn.Linear:
            staying.add(module.weight.untyped_storage().data_ptr())

    place = Structure.place
    monkeypatch.setattr(Structure, "place", watched)
    try:
        load(
            FluxTransformer2DModel,
            source(tmp_path),
            "transformer",
            torch.bfloat16,
            replacer(find(weights), KEEP),
        )
    finally:
        gc.enable()
    assert len(counts) > 20
    assert max(counts) == 1


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Path]:
    """A language model in its own folder, with one matrix for both ends, in two shards."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    model.generation_config.eos_token_id = [3, 7]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    shards(tmp_path / "llama", 2)
    yield tmp_path / "llama"


def answer(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_language_model_is_what_its_library_loads(llama: Path, dtype: torch.dtype) -> None:
    found = load(LlamaForCausalLM, source(llama), "", dtype)
    expected = LlamaForCausalLM.from_pretrained(llama, dtype=dtype)
    assert torch.equal(answer(found), answer(expected))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert {p.dtype for p in found.parameters()} == {dtype}
    assert found.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(found.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert found.generation_config.eos_token_id == [3, 7]


def test_a_random_language_model_keeps_its_rope_table(llama: Path) -> None:
    found = load(LlamaForCausalLM, source(llama, random=frozenset({""})), "", torch.bfloat16)
    expected = LlamaForCausalLM(LlamaConfig(**LLAMA)).model.rotary_emb.inv_freq
    assert found.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(found.model.rotary_emb.inv_freq, expected)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["int8", "nf4"])
@pytest.mark.parametrize("random", [frozenset(), frozenset({""})])
def test_a_shared_matrix_is_not_quantised(llama: Path, weights: str, random: frozenset[str]) -> None:
    replace = replacer(find(weights), ())
    found = load(LlamaForCausalLM, source(llama, random=random), "", torch.bfloat16, replace)
    assert count_quantized(found, weights)[0] == 2 * 7
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert torch.isfinite(answer(found)).all()


def test_tables_that_old_files_hold_are_computed(llama: Path) -> None:
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, llama / "model-2.safetensors")
    path = llama / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = "model-2.safetensors"
    path.write_text(json.dumps(index))
    assert load(LlamaForCausalLM, source(llama), "", torch.float32).model.rotary_emb.inv_freq.min() > 0


def test_a_language_model_without_all_of_its_files_is_told(llama: Path) -> None:
    file = llama / "model-0.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(AccessError, match=name):
        load(LlamaForCausalLM, source(llama), "", torch.float32)


def test_blocks_of_a_language_model_recompute(llama: Path) -> None:
    model = load(LlamaForCausalLM, source(llama), "", torch.float32).train()
    model.get_input_embeddings().weight.requires_grad_(True)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute_blocks(repeated_blocks(model, ("LlamaDecoderLayer",)))
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert len(calls) == 4


@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_blocks_of_another_rank_are_not_read(
    weights: str | None, flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of the right sizes and types all the same, without values."""
    kind, base = FluxTransformer2DModel, source(flux)
    replace = None if weights is None else replacer(find(weights), KEEP)
    whole = load(kind, base, "transformer", torch.bfloat16, replace)
    asked: list[str] = []
    plain = reading.Shard

    def watched(*, get_tensor: Callable[[str], torch.Tensor], **others: Any) -> reading.Shard:
        def asking(name: str) -> torch.Tensor:
            asked.append(name)
            return get_tensor(name)

        return plain(get_tensor=asking, **others)

    monkeypatch.setattr(reading, "Shard", watched)
    block = "single_transformer_blocks.0"
    structure = build_structure(
        kind, base, "transformer", device="cpu", dtype=torch.bfloat16, replace=replace
    )
    found = fill_structure(structure, elsewhere={block: "meta"})
    assert asked and not [name for name in asked if name.startswith(f"{block}.")]
    for name, wanted in whole.state_dict().items():
        one = found.state_dict()[name]
        assert (one.shape, one.dtype, one.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        assert one.is_meta == name.startswith(f"{block}.")
        assert one.is_meta or torch.equal(one, wanted)
