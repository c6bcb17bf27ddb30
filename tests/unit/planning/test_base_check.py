"""A damaged base model, and one of another family, is told by component before anything loads."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from tests.tiny import TINY_MODELS
from tests.unit.data.test_bad_sets import nobody
from tests.unit.planning.conftest import machine
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.engine.building.base_load_check import check_loadable
from trainer.errors import AccessError, ConfigError
from trainer.families import components, get
from trainer.modeling.base.base import is_repository, local_folder
from trainer.modeling.base.load import load_component, renaming
from trainer.modeling.base.source import resolve_source
from trainer.modeling.base.structure import built_empty
from trainer.planning.base_check import check_base, named_class
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run, prepare_base
from trainer.planning.rules import beyond_positions
from trainer.planning.shapes.run_shapes import CONFIGS

ROOT = Path(__file__).parents[3]
Damage = Callable[[Path], None]


def loaded(base: Path, family: str = "flux1_dev", **model: object) -> Loaded:
    kind = "img_dir" if get(family).sample_kind == "image" else "chat_file"
    config = RunConfig.model_validate(
        {
            "family": family,
            "model": {"pretrained_model_name_or_path": str(base), **model},
            "data": {"sets": [{kind: "/data"}], "resolution": 64, "caption_dropout_rate": 0.0},
            "output_dir": "/out",
        }
    )
    return Loaded(config=config, sources={})


def plan(base: Path, family: str = "flux1_dev") -> Plan:
    asked = loaded(base, family)
    prepare_base(asked)
    return plan_run(asked, machine("cpu"))


def check(base: Path, family: str = "flux1_dev", **model: object) -> None:
    """Check the base like every job does before it loads anything."""
    asked, one = loaded(base, family, **model), get(family)
    check_base(one, asked, base)
    check_loadable(one, resolve_source(asked.config, components(one), trained=one.trained_component))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_sound_base_of_every_family_passes(tiny_base: Callable[[str], Path], family: str) -> None:
    check(tiny_base(family), family)
    assert not [one for one in plan(tiny_base(family), family).warnings if "base model" in one]


def test_the_tiny_base_that_draws_passes() -> None:
    check(ROOT / "assets/tiny-flux")


def test_a_base_of_configs_alone_passes_where_weights_are_random(
    tiny_flux1_dev: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    for file in base.rglob("*.safetensors"):
        file.unlink()
    check(base, weights="random")


# ---- damage


def edited(place: str, **changes: Any) -> Damage:
    def damage(base: Path) -> None:
        path = base / place
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value != "GONE"}))

    return damage


def replaced(place: str, text: str) -> Damage:
    return lambda base: (base / place).write_text(text) and None


def gone(place: str) -> Damage:
    def damage(base: Path) -> None:
        path = base / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def tensors(component: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(base: Path) -> None:
        (path,) = (base / component).glob("*.safetensors")
        save_file({name: change(value).contiguous() for name, value in load_file(path).items()}, path)

    return damage


def cut_off(component: str) -> Damage:
    def damage(base: Path) -> None:
        (path,) = (base / component).glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def other_tokenizer(base: Path) -> None:
    """The second text encoder's, which knows more words than the first."""
    shutil.rmtree(base / "tokenizer")
    shutil.copytree(base / "tokenizer_2", base / "tokenizer")


def wider(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, value]) if value.ndim == 2 else value


CLIP = "text_encoder/config.json"
QUICK = {
    "config is a list": (replaced("transformer/config.json", "[]"), "transformer/config.json"),
    "config is empty": (replaced("transformer/config.json", ""), "transformer/config.json"),
    "size is a text": (
        edited("transformer/config.json", num_layers="two"),
        "transformer: num_layers is 'two'",
    ),
    "size is zero": (
        edited("transformer/config.json", num_attention_heads=0),
        "transformer: num_attention_heads is 0, and a size cannot be 0",
    ),
    "size is negative": (edited("transformer/config.json", num_layers=-2), "transformer: num_layers is -2"),
    "size is missing": (
        edited("transformer/config.json", num_attention_heads="GONE"),
        "transformer/config.json: it does not say num_attention_heads",
    ),
    "sizes are a number": (edited("vae/config.json", block_out_channels=8), "vae: block_out_channels is 8"),
    "vae without scale": (
        edited("vae/config.json", scaling_factor="GONE"),
        "vae: it does not say scaling_factor",
    ),
    "vae without shift": (edited("vae/config.json", shift_factor=None), "vae: it does not say shift_factor"),
    "vae of another class": (
        edited("vae/config.json", _class_name="AutoencoderKLWan"),
        "vae: its config is of a Auto",
    ),
    "encoder of another type": (
        edited(CLIP, model_type="bert"),
        "text_encoder: its config is of model_type bert",
    ),
    "encoder of another class": (
        edited(CLIP, architectures=["T5EncoderModel"]),
        "text_encoder: its config is of T5EncoderModel, and a CLIPTextModel is needed",
    ),
    "classes in no list": (
        edited(CLIP, architectures="CLIPTextModel"),
        "text_encoder: architectures is 'CLIPTextModel', and a list of names is needed",
    ),
    "other class in the index": (
        edited("model_index.json", text_encoder=["transformers", "T5EncoderModel"]),
        "text_encoder: it is a T5EncoderModel, and FLUX.1-dev has a CLIPTextModel",
    ),
    "no entry in the index": (edited("model_index.json", vae="GONE"), "vae: the index names None"),
    "scheduler of another class": (
        edited("model_index.json", scheduler=["diffusers", "DDIMScheduler"]),
        "scheduler: it is a DDIMScheduler",
    ),
    "scheduler garbage": (
        replaced("scheduler/scheduler_config.json", "garbage"),
        "scheduler/scheduler_config.json: cannot be read",
    ),
    "scheduler with a text": (
        edited("scheduler/scheduler_config.json", num_train_timesteps="many"),
        "scheduler: num_train_timesteps is 'many', and a number is needed",
    ),
    "index is garbage": (replaced("model_index.json", "{]"), "model_index.json"),
    "no tokenizer": (gone("tokenizer"), "no component 'tokenizer'"),
    "no vocabulary": (gone("tokenizer/tokenizer.json"), "base/tokenizer: no vocabulary (tokenizer.json"),
    "no second vocabulary": (gone("tokenizer_2/tokenizer.json"), "base/tokenizer_2: no vocabulary"),
    "no scheduler": (gone("scheduler"), "no component 'scheduler'"),
    "no weights": (gone("vae/diffusion_pytorch_model.safetensors"), "vae: no .safetensors file"),
    "weights cut off": (
        cut_off("text_encoder"),
        "text_encoder/model.safetensors: not a readable safetensors file",
    ),
    "index of weights is a list": (
        replaced("transformer/diffusion_pytorch_model.safetensors.index.json", '{"weight_map": ["a"]}'),
        "the index of the weight files cannot be read",
    ),
}


@pytest.mark.parametrize("what", QUICK)
def test_what_configs_tell_is_told_by_the_plan(tiny_flux1_dev: Path, tmp_path: Path, what: str) -> None:
    damage, words = QUICK[what]
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    damage(base)
    with pytest.raises(AccessError) as caught:
        plan(base)
    assert words in str(caught.value)
    assert "->" in str(caught.value)


def test_a_component_of_another_class_is_not_to_be_copied_again(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    QUICK["encoder of another class"][0](base)
    with pytest.raises(
        AccessError, match=r"put FLUX\.1-dev's own there, or name a base of FLUX\.1-dev"
    ) as caught:
        plan(base)
    assert "copy" not in str(caught.value)


def test_a_language_model_whose_classes_are_in_no_list_is_told_so(
    tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_base("llama"), tmp_path / "base"))
    edited("config.json", architectures="LlamaForCausalLM")(base)
    with pytest.raises(AccessError, match="architectures is 'LlamaForCausalLM', and a list of names"):
        plan(base, "llama")


SLOW = {
    "a size that its files do not have": (
        edited("transformer/config.json", joint_attention_dim=8),
        "another shape than its config says, first context_embedder.weight: 64 x 32, not 64 x 8",
    ),
    "a class's default in place of a size": (
        edited("transformer/config.json", in_channels="GONE"),
        "tensors of its files have another shape",
    ),
    "a block that no class has": (
        edited("vae/config.json", down_block_types=["Nothing"] * 2),
        "vae: AutoencoderKL cannot be built from its config",
    ),
    "weights of another width": (
        tensors("text_encoder_2", wider),
        "text_encoder_2: 1",
    ),
    "weights of another model": (
        lambda base: shutil.copy(
            base / "vae/diffusion_pytorch_model.safetensors", base / "text_encoder/model.safetensors"
        ),
        "text_encoder: none of the",
    ),
    "a transformer of zeros": (
        tensors("transformer", torch.zeros_like),
        "transformer: diffusion_pytorch_model.safetensors holds nothing but zeros",
    ),
    "an empty vocabulary": (
        edited("tokenizer/tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
        "tokenizer: it knows none of the words",
    ),
    "tokenizer garbage": (
        replaced("tokenizer/tokenizer.json", "garbage"),
        "tokenizer: CLIPTokenizer cannot be opened",
    ),
    "tokenizer empty": (
        replaced("tokenizer_2/tokenizer.json", "{}"),
        "tokenizer_2: T5TokenizerFast cannot be opened",
    ),
    "tokenizer config garbage": (
        replaced("tokenizer/tokenizer_config.json", "[1"),
        "tokenizer: CLIPTokenizer cannot",
    ),
}


@pytest.mark.parametrize("what", SLOW)
def test_what_the_libraries_tell_is_told_before_anything_loads(
    tiny_flux1_dev: Path, tmp_path: Path, what: str
) -> None:
    damage, words = SLOW[what]
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    damage(base)
    with pytest.raises(AccessError) as caught:
        check(base)
    assert words in str(caught.value)
    assert "->" in str(caught.value)


# ---- the family


@pytest.mark.parametrize(
    ("base", "family", "right"),
    [
        ("flux1_dev", "qwen_image", "flux1_dev"),
        ("flux1_dev", "qwen_image_edit", "flux1_dev"),
        ("flux1_dev", "kandinsky5", "flux1_dev"),
        ("flux1_dev", "flux2_dev", "flux1_dev"),
        ("flux1_dev", "llama", "flux1_dev"),
        ("llama", "flux1_dev", "llama"),
        ("qwen_image", "qwen_image_edit", "qwen_image"),
        ("kandinsky5", "flux1_kontext", "kandinsky5"),
        ("qwen2", "llama", "qwen2"),
        ("qwen3", "qwen2", "qwen3"),
        ("mistral", "llama", "mistral"),
        ("llama", "mistral", "llama"),
    ],
)
def test_another_family_is_named(
    tiny_base: Callable[[str], Path], base: str, family: str, right: str
) -> None:
    with pytest.raises(ConfigError, match=f"`family` is {family}, and the base model is a") as caught:
        plan(tiny_base(base), family)
    assert f"write `family: {right}`" in str(caught.value)


def test_a_model_of_no_family_is_named_by_its_class(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    edited("model_index.json", _class_name="SanaPipeline", transformer=["diffusers", "Sana"])(base)
    with pytest.raises(ConfigError, match="the base model is a SanaPipeline around a Sana"):
        plan(base)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 512}, None),
        ("mistral", {"sliding_window": 511}, 511),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
    ],
)
def test_a_window_shorter_than_a_conversation_is_refused(
    tiny_base: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    window: int | None,
) -> None:
    base = Path(shutil.copytree(tiny_base(family), tmp_path / "base"))
    path = base / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in config if key != "layer_types"} | changes))
    asked = loaded(base, family)
    assert asked.config.data.max_sequence_length == 512
    if window is None:
        plan(base, family)
        return
    with pytest.raises(ConfigError, match=rf"attends to the last {window} only") as caught:
        plan(base, family)
    (problem,) = caught.value.problems
    assert problem.where == "data.max_sequence_length" and str(path) in problem.what
    assert f"write data.max_sequence_length: {window} or less" in problem.remedy


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"max_position_embeddings": 512}, None),
        ({"max_position_embeddings": 511}, 511),
        ({"max_position_embeddings": 128, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 2.0}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256),
        # published bases with YaRN say the scaled positions, or the first ones, or both
        *(
            (
                {
                    "max_position_embeddings": said,
                    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                },
                256,
            )
            for said in (64, 256)
        ),
        ({"max_position_embeddings": None}, None),
    ],
    ids=str,
)
def test_a_conversation_longer_than_the_base_s_positions_is_told(
    tiny_base: Callable[[str], Path], changes: dict[str, Any], most: int | None, tmp_path: Path
) -> None:
    """Positions that a base has never seen train without an error, and worse."""
    config = json.loads((tiny_base("llama") / "config.json").read_text())
    for rope in ("rope_scaling", "rope_parameters"):
        config.pop(rope, None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | changes))
    told = [*beyond_positions(get("llama"), loaded(tmp_path, "llama"), tmp_path)]
    assert len(told) == (most is not None)
    assert most is None or f"conversations of more than {most} tokens" in told[0]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        # FLUX.1-Fill and FLUX.1-Depth, by what published ones add to the latents
        ("flux1_dev", {"in_channels": 384, "out_channels": 64}, "in_channels 384 for 64 that it gives"),
        ("flux1_dev", {"in_channels": 128, "out_channels": 64}, "in_channels 128 for 64 that it gives"),
        ("kandinsky5", {"visual_cond": True}, "visual_cond: true"),
        ("qwen_image", {"use_additional_t_cond": True}, "use_additional_t_cond: true"),
    ],
)
def test_relatives_that_take_more_than_latents_are_refused(
    family: str, changes: dict[str, Any], said: str, tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their class is the family's, so that all else of them fits until the first batch comes."""
    base = Path(shutil.copytree(tiny_base(family), tmp_path / "base"))
    edited("transformer/config.json", **changes)(base)
    with pytest.raises(ConfigError, match="takes more than the noised picture") as caught:
        plan(base, family)
    assert said in caught.value.problems[0].what


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_attention_dropout_that_a_base_asks_for_is_told(
    tiny_base: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    base = Path(shutil.copytree(tiny_base(family), tmp_path / "base"))
    assert not [one for one in plan(base, family).warnings if "dropout" in one]
    edited("config.json", attention_dropout=0.1)(base)
    (told,) = (one for one in plan(base, family).warnings if "dropout" in one)
    assert told.startswith("the base is trained without the attention_dropout of 0.1 that ")


@pytest.mark.parametrize(
    ("base", "family"), [("flux1_kontext", "flux1_dev"), ("qwen_image_edit", "qwen_image")]
)
def test_a_base_that_two_families_can_train_is_told(
    tiny_base: Callable[[str], Path], base: str, family: str
) -> None:
    warnings = plan(tiny_base(base), family).warnings
    assert [one for one in warnings if f"for which `family: {base}` is" in one]


@pytest.mark.parametrize("closed", ["above", "above/base", "above/base/transformer"])
def test_a_folder_that_this_user_may_not_enter_is_named(tiny_flux1_dev: Path, closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # that of pytest is closed to others
        base = Path(shutil.copytree(tiny_flux1_dev, Path(name, "above/base")))
        assert plan(base).device == "cpu"
        shut, asked = Path(name, closed), loaded(base)
        with nobody(Path(name)):
            shut.chmod(0o600)
            try:
                for refused in (lambda: plan_run(asked, machine("cpu")), lambda: prepare_base(asked)):
                    with pytest.raises(AccessError, match="this user may not read") as caught:
                        refused()
                    (problem,) = caught.value.problems
                    assert problem.where == str(base) and str(shut) in problem.what
                    assert not is_repository(asked.config)
            finally:
                shut.chmod(0o700)


@pytest.mark.parametrize("closed", [".", "models--owner--name", "models--owner--name/snapshots/" + 40 * "a"])
def test_a_cache_that_this_user_may_not_enter_is_named(
    tiny_flux1_dev: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name, "hub")
        repository = cache / "models--owner--name"
        shutil.copytree(tiny_flux1_dev, repository / "snapshots" / (40 * "a"))
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(40 * "a")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        asked = loaded(Path("owner/name"))
        assert local_folder(asked.config) is not None
        with nobody(Path(name)):
            (cache / closed).chmod(0o600)
            try:
                with pytest.raises(AccessError, match="this user may not read") as caught:
                    prepare_base(asked)
            finally:
                (cache / closed).chmod(0o700)
        (problem,) = caught.value.problems
        assert problem.where.startswith(str(cache))


def test_an_older_edit_base_is_planned(tiny_base: Callable[[str], Path], tmp_path: Path) -> None:
    """Edit bases before 2511 have no key `zero_cond_t`."""
    base = Path(shutil.copytree(tiny_base("qwen_image_edit"), tmp_path / "base"))
    edited("transformer/config.json", zero_cond_t="GONE")(base)
    assert plan(base, "qwen_image_edit").device == "cpu"


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "vae"])
def test_tensors_that_files_lack_are_not_drawn(tiny_flux1_dev: Path, tmp_path: Path, component: str) -> None:
    from transformers import CLIPTextModel, T5EncoderModel

    classes = {"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel, "vae": AutoencoderKL}
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    (path,) = (base / component).glob("*.safetensors")
    state = load_file(path)
    lost = next(
        name for name in sorted(state) if (name.endswith("weight") and "layer" in name) or "conv" in name
    )
    save_file({name: value for name, value in state.items() if name != lost}, path, {"format": "pt"})
    config = loaded(base).config
    source = resolve_source(config, components(get("flux1_dev")), trained="transformer")
    with pytest.raises(AccessError, match=r"1 tensor of .* is in none of its files"):
        load_component(classes[component], source, component, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "component", "published"),
    [
        ("flux1_dev", "text_encoder", "text_model.encoder.layers.0.mlp.fc1.weight"),
        ("flux1_dev", "text_encoder_2", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        ("qwen_image", "text_encoder", "model.layers.0.mlp.down_proj.weight"),
        ("qwen_image", "text_encoder", "visual.blocks.0.mlp.down_proj.weight"),
        ("flux2_dev", "text_encoder", "language_model.model.layers.0.mlp.down_proj.weight"),
        ("flux2_dev", "text_encoder", "vision_tower.transformer.layers.0.attention.q_proj.weight"),
    ],
)
def test_names_of_published_files_are_those_of_the_classes(
    family: str, component: str, published: str
) -> None:
    """Files of older versions of transformers are compared too, not passed over as unknown."""
    component_class = getattr(transformers, named_class(get(family), component))
    module = built_empty(component_class, CONFIGS / family / component, torch.bfloat16)
    assert renaming(module)(published) in module.state_dict()
