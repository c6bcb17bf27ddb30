"""Llama 3: chats with a causal language model (8 B; the class is that of all models of its architecture)."""

from __future__ import annotations

from trainer.families.causal import causal_family

LLAMA = causal_family(
    name="llama",
    title="Llama 3",
    licence="Llama 3.1 Community License Agreement",
    base="meta-llama/Llama-3.1-8B-Instruct",
    max_sequence_length=131_072,
    model="LlamaForCausalLM",
    block="LlamaDecoderLayer",
)
