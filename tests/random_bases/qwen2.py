"""Qwen2.5: two layers with biases on queries, keys and values, and conversations in ChatML."""

from __future__ import annotations

import functools
from typing import Any

from tests.random_bases.common import Base
from tests.random_bases.llama import encoders, tokenizer

# a conversation without a system message is given one
_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou answer.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

SPECIAL: dict[str, Any] = {"bos": None, "eos": "<|im_end|>", "others": ("<|endoftext|>", "<|im_start|>")}
"""Special tokens of ChatML: none begins a text."""


def prepare(component: str, model: Any) -> None:
    """Fill the biases, which start at zero."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.1)


BASE = Base(
    tokenizers={"": functools.partial(tokenizer, template=_TEMPLATE, **SPECIAL)},
    encoders=encoders,
    classes={"": ("transformers", "Qwen2ForCausalLM")},
    prepare=prepare,
)
