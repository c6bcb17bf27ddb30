"""Qwen3: chats with a causal language model that thinks before it answers (8 B; dense models of all sizes).

Llama's blocks with an RMSNorm of each head's query and key before RoPE.
"""

from __future__ import annotations

from trainer.families import language
from trainer.families.causal import causal_family

QWEN3 = causal_family(
    name="qwen3",
    title="Qwen3",
    licence="Apache-2.0",
    base="Qwen/Qwen3-8B",
    max_sequence_length=40_960,
    model="Qwen3ForCausalLM",
    block="Qwen3DecoderLayer",
    # the chat template takes the thinking out of an answer once the user has gone on: only the last answer
    # stands in a conversation as the model writes it
    data={"learn": "last_answer"},
    window=language.window_of_some_layers,
)
