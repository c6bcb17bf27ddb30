"""A small Llama that reads text byte by byte: what `bench converge --method full` trains from nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.random_bases import CONFIGS
from tests.random_bases.llama import make_tokenizer

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Changes of the published config by the base's name. Sides are multiples of 16, as FP8 products need them;
`small` has 142 million weights in its blocks, `tiny` is to try a command out.
"""
_MULTIPLE = 16
_LONGEST = 8192


def build(size: str, output: Path) -> None:
    """Write Llama 3's configs with these changes and a tokenizer of bytes into `output`, and no weights:
    `model.weights: random` draws them as transformers does (normal, 0.02). Equal arguments give equal bytes.
    """
    tokenizer = make_tokenizer([], longest=_LONGEST)
    changes = {
        **SIZES[size],
        "vocab_size": -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE,
        "max_position_embeddings": _LONGEST,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_scaling": None,
    }
    output.mkdir(parents=True, exist_ok=True)
    config = json.loads((CONFIGS / "llama" / "config.json").read_text()) | changes
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(output)
