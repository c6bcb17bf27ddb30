"""Mistral: two layers without a sliding window, and a template in which a system message has no place."""

from __future__ import annotations

import functools

from tests.random_bases.common import Base
from tests.random_bases.llama import encoders, tokenizer

# a system message stands before the last question, and only where no answer follows it
_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set before = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
        {{- '[INST] ' + (before if loop.last else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

BASE = Base(
    tokenizers={
        # [INST] is plain text, as before version 0.3
        "": functools.partial(tokenizer, template=_TEMPLATE, bos="<s>", eos="</s>", others=())
    },
    encoders=encoders,
    classes={"": ("transformers", "MistralForCausalLM")},
)
