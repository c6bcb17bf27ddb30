"""The LoRA keys that ComfyUI's loaders know, by family.

Source: github.com/comfyanonymous/ComfyUI. comfy/lora.py, `model_lora_keys_unet`, maps `transformer.<module>`
for every module that comfy/utils.py, `flux_to_diffusers`, names; `load_lora` (comfy/weight_adapter/lora.py)
then looks for `<key>.lora_B.weight` (up), `<key>.lora_A.weight` (down) and `<key>.alpha`, and adds
alpha / rank * up @ down to the weight. A LoRA file with a key that is in none of the maps loads with the
warning "lora key not loaded" and without that layer.
"""

from __future__ import annotations

import re

_FLUX = (
    r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj)",
    r"transformer_blocks\.\d+\.attn\.(to_out\.0|to_add_out)",
    r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
    r"transformer_blocks\.\d+\.(norm1|norm1_context)\.linear",
    r"single_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v)",
    r"single_transformer_blocks\.\d+\.(proj_mlp|proj_out|norm\.linear)",
)
_QWEN = (
    r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj)",
    r"transformer_blocks\.\d+\.attn\.(to_out\.0|to_add_out)",
    r"transformer_blocks\.\d+\.(img_mlp|txt_mlp)\.net\.(0\.proj|2)",
)
KNOWN_MODULES: dict[str, tuple[str, ...]] = {
    "flux1_dev": _FLUX,
    "flux1_kontext": _FLUX,
    "kandinsky5": (
        r"visual_transformer_blocks\.\d+\.(self_attention|cross_attention)\.(to_query|to_key|to_value|out_layer)",
        r"text_transformer_blocks\.\d+\.self_attention\.(to_query|to_key|to_value|out_layer)",
        r"(visual|text)_transformer_blocks\.\d+\.feed_forward\.(in_layer|out_layer)",
    ),
    "qwen_image": _QWEN,
    "qwen_image_edit": _QWEN,
    "flux2_dev": (
        r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj)",
        r"transformer_blocks\.\d+\.attn\.(to_out\.0|to_add_out)",
        r"transformer_blocks\.\d+\.(ff|ff_context)\.(linear_in|linear_out)",
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
    ),
}
"""Regular expressions over whole module names in diffusers' spelling."""


def unknown_keys(family: str, keys: set[str]) -> set[str]:
    """Keys of a file that ComfyUI would not load for this family."""
    modules = "|".join(f"(?:{pattern})" for pattern in KNOWN_MODULES[family])
    known = re.compile(
        rf"(?:transformer|diffusion_model)\.(?:{modules})\.(lora_A\.weight|lora_B\.weight|alpha)"
    )
    return {key for key in keys if not known.fullmatch(key)}
