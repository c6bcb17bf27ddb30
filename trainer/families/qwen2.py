"""Qwen2.5: chats with a causal language model (7 B; the class is that of Qwen2 and Qwen2.5 of all sizes).

Llama's blocks with biases in the projections of queries, keys and values.
"""

from __future__ import annotations

from trainer.families import language
from trainer.families.causal import causal_family

QWEN2 = causal_family(
    name="qwen2",
    title="Qwen2.5",
    licence="Apache-2.0",
    base="Qwen/Qwen2.5-7B-Instruct",
    max_sequence_length=32_768,
    model="Qwen2ForCausalLM",
    block="Qwen2DecoderLayer",
    window=language.window_of_some_layers,
)
