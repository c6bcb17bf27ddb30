"""Qwen3: two layers with norms of heads, and a chat template that removes the thinking of earlier answers."""

from __future__ import annotations

import functools
from typing import Any

from tests.random_bases.common import Base
from tests.random_bases.llama import encoders, tokenizer
from tests.random_bases.qwen2 import SPECIAL

# what stands after the last question has its thinking, or an empty one; what stands before has none
_TEMPLATE = """\
{%- set asked = namespace(last=0) %}
{%- for message in messages if message['role'] == 'user' %}{% set asked.last = message %}{% endfor %}
{%- set after = namespace(it=false) %}
{%- for message in messages %}
    {%- set text = message['content'] %}
    {%- if message['role'] == 'assistant' %}
        {%- set thought = text.split('</think>')[0].split('<think>')[-1] if '</think>' in text else '' %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- if after.it %}
            {%- set text = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}
    {%- if message is sameas asked.last %}{% set after.it = true %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def prepare(component: str, model: Any) -> None:
    """Spread the norms of heads, which start at one."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


BASE = Base(
    tokenizers={"": functools.partial(tokenizer, template=_TEMPLATE, **SPECIAL)},
    encoders=encoders,
    classes={"": ("transformers", "Qwen3ForCausalLM")},
    prepare=prepare,
)
