"""Mistral: chats with a causal language model (7 B; the class is that of all models of its architecture).

Llama's blocks; before version 0.2 a token attends to the last 4,096 alone.
"""

from __future__ import annotations

from trainer.families.causal import causal_family

MISTRAL = causal_family(
    name="mistral",
    title="Mistral",
    licence="Apache-2.0",
    base="mistralai/Mistral-7B-Instruct-v0.3",
    max_sequence_length=32_768,
    model="MistralForCausalLM",
    block="MistralDecoderLayer",
    # transformers takes 4,096 where a config does not say it, and null for no window
    window=lambda config: config.get("sliding_window", 4096),
)
