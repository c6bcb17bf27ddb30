"""Ways to store the weights of a base: what other floors must know of them."""

from __future__ import annotations

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

QUANTIZED = ("int8", "nf4")
"""Storages of a frozen base that need a library, the more precise first."""

PACK_MODULATION = QUANTIZED
"""Those that hold the linears of `Family.modulation` quantised too."""

PACKED = (*QUANTIZED, "fp8")
"""Storages of a frozen base with fewer bytes than the run's type."""

ENCODERS_KEEP = (r"(?!.*\.\d+\.).*", r".*\.(wo|relative_attention_bias)")
"""Expressions for modules of a text encoder that are never quantised: all but its layers, and in these what a
class reads the type of, or looks up rows of."""

NF4_MOST_UNPACKED = 64 * 2**20
"""Values of a weight that are unpacked at a time."""
