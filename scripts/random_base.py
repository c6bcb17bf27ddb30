"""Write a base model with random weights, in diffusers' layout, without network.

    python scripts/random_base.py flux1_dev --size tiny --output build/base
    python scripts/random_base.py flux1_dev --size full --no-weights --output build/flux1_dev_full

`tiny` is for tests and the demo: every component has its real class and is 2 MB at most. `full` writes
only the real configs and small tokenizers, for `model.weights: random`. Equal arguments give equal bytes.
A new family is one entry of FAMILIES.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "trainer" / "families" / "configs"

# what the tokenizers learn: words of image captions
CORPUS = """
a photo of a cat, a drawing of a dog, the face of an orange fox, an owl and a frog on a green leaf, two
birds in a tree a red apple, a golden key, a white house with a blue roof, a purple balloon on a string, a
brown horse in the snow a bicycle, a car, a boat on the water, a rocket in the night sky, a camera, a crown
with gems, a birthday cake with candles a woman with long hair, a man in a black coat, a child with a hat,
people on a street, a portrait in soft light a mountain behind a lake, a forest in autumn, a beach at
sunset, clouds over a city, flowers in a garden, stars and moon in the style of an oil painting, watercolor,
pencil sketch, pixel art, 3d emoji style, flat icon, duotone, line art high quality, detailed, close up,
from above, side view, white background, bright colors, dark shadows, yellow and grey
"""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the committed configs of a family (CONFIGS) leave open."""

    tokenizers: Mapping[str, Callable[[], Any]]
    """How each tokenizer is made, by its folder's name."""
    tiny_configs: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    """Configs of the tiny models by component, given the tokenizers."""


def clip_tokenizer() -> Any:
    """A CLIPTokenizer that joins the corpus' words."""
    return make_clip_tokenizer(_words(), merges=240)


def make_clip_tokenizer(words: Counter[str], *, merges: int) -> Any:
    """A CLIPTokenizer for any text, by its bytes; <|endoftext|> has the highest id, as in the original."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    pairs: Any = _merges(words, count=merges)  # annotated as lists of texts, documented as pairs
    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [letter + "</w>" for letter in alphabet] + [left + right for left, right in pairs]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=pairs, model_max_length=77)


def _words() -> Counter[str]:
    return Counter(re.findall(r"[a-z0-9]+", CORPUS))


def _merges(words: Mapping[str, int], count: int) -> list[tuple[str, str]]:
    """The `count` most frequent pairs, or all, as byte pair encoding finds them; ties in alphabetical order.

    The trainer of the tokenizers library breaks ties by chance.
    """
    splits = {word: [*word[:-1], word[-1] + "</w>"] for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in splits.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, parts in splits.items():
            splits[word] = _joined(parts, best)
    return merges


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with every occurrence of `pair` made one."""
    result: list[str] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def t5_tokenizer() -> Any:
    """A T5Tokenizer of the corpus' words."""
    return make_t5_tokenizer(_words())


def make_t5_tokenizer(words: Counter[str]) -> Any:
    """A T5Tokenizer: `words`, and every printable ASCII character for all other words."""
    from transformers import T5Tokenizer

    total = sum(words.values())
    pieces = {f"▁{word}": math.log(count / total) for word, count in sorted(words.items())}
    # single characters cost more than any word, so that a known word is one piece
    characters = {chr(code): -10.0 for code in range(ord("!"), ord("~") + 1)} | {"▁": -10.0}
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = special + list((characters | pieces).items())
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def _tiny_clip(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _tiny_t5(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": width // 2,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _tiny_vae(latent_channels: int) -> dict[str, Any]:
    """Three levels: one latent covers 4x4 pixels."""
    return {
        "block_out_channels": [8, 16, 16],
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": latent_channels,
        "sample_size": 64,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def _flux1_dev_tiny(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Four heads of 16, two blocks of each kind, captions 32 wide."""
    latent_channels, text_width, pooled_width = 4, 32, 32
    return {
        "transformer": {
            "in_channels": 4 * latent_channels,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
            "joint_attention_dim": text_width,
            "pooled_projection_dim": pooled_width,
            "guidance_embeds": True,
        },
        "vae": _tiny_vae(latent_channels),
        "text_encoder": _tiny_clip(tokenizers["tokenizer"], pooled_width),
        "text_encoder_2": _tiny_t5(tokenizers["tokenizer_2"], text_width),
    }


FAMILIES: dict[str, Base] = {
    "flux1_dev": Base(
        tokenizers={"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer},
        tiny_configs=_flux1_dev_tiny,
    ),
}


def build(
    family: str, size: Literal["tiny", "full"], output: Path, *, weights: bool = True, seed: int = 0
) -> None:
    """Write the base model of `family` into `output`, which must be empty or new.

    Raises ValueError for a full-size model with weights, FileExistsError where the folder holds something.
    """
    if size == "full" and weights:
        raise ValueError(
            "full-size random weights are not written to disk; use --no-weights and `model.weights: random`"
        )
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty")
    base = FAMILIES[family]
    shutil.copytree(CONFIGS / family, output, dirs_exist_ok=True)
    tokenizers = {name: make() for name, make in base.tokenizers.items()}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(output / name)
    if size == "tiny":
        classes = json.loads((output / "model_index.json").read_text())
        for name, config in base.tiny_configs(tokenizers).items():
            library, class_name = classes[name]
            model_class = getattr(importlib.import_module(library), class_name)
            _write_model(model_class, config, output / name, weights=weights, label=f"{seed}/{name}")


def _write_model(
    model_class: Any, config: Mapping[str, Any], folder: Path, *, weights: bool, label: str
) -> None:
    """One model with its library's own initialisation, seeded by `label`."""
    from transformers import PreTrainedModel

    from trainer.modeling.seeds import seeded
    from trainer.modeling.tensorfile import rewrite_sorted

    with seeded(label, "cpu"):
        if issubclass(model_class, PreTrainedModel):
            model = model_class(model_class.config_class(**config))
        else:
            model = model_class(**config)
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        if weights:
            rewrite_sorted(path, {})
        else:
            path.unlink()


def main() -> None:
    """The command line."""
    import transformers

    parser = argparse.ArgumentParser(
        description="Write a base model with random weights, in diffusers' layout, without network."
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--no-weights", action="store_true", help="configs and tokenizers only")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        build(
            arguments.family,
            arguments.size,
            arguments.output,
            weights=not arguments.no_weights,
            seed=arguments.seed,
        )
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
