"""Llama 3: chats with a causal language model (8 B; the class is that of all models of its architecture).

Conversations are packed into rows and attend to themselves only; the numerics are in `language`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families import language
from trainer.families.family import EntryKind
from trainer.families.values import (
    AttentionShape,
    Batch,
    Draw,
    Header,
    PreviewPrompt,
    PreviewRequest,
    Rows,
    Shape,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import Scan
    from trainer.modeling.base.source import ModelSource

_BLOCKS = r"model\.layers\.\d+"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_MLP = r"mlp\.(gate|up|down)_proj"
_NO_PIXELS = "a language model has no pixels"


class Llama:
    """Family `llama`."""

    name = "llama"
    title = "Llama 3"
    licence = "Llama 3.1 Community License Agreement"
    cache_version = 1
    pixel_multiple = 1
    sample_kind = "conversation"
    control_counts = (0, 0)
    text_sees_controls = False
    max_sequence_length = 131_072
    caption = None
    text_keys = ()
    packed_by = "input_ids"
    comfyui = None
    comfyui_swaps = ()
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        "data": {"max_sequence_length": 4096, "caption_dropout_rate": 0.0},
        # adapters on attention alone learn less than those on all layers (QLoRA, arXiv 2305.14314)
        "lora": {"rank": 16, "alpha": 16.0, "target_modules": "all-linear"},
        "train": {
            "learning_rate": 2.0e-4,
            "max_train_steps": 500,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 20,
        },
    }
    lora_targets: Mapping[str, str] = {
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|{_MLP})",
    }
    # the two ends of the model decide over single tokens
    high_precision = (r"lm_head", r"model\.embed_tokens")
    modulation = ()
    blocks = ("LlamaDecoderLayer",)
    trained_component = ""
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = {"text": ()}
    support_components: tuple[str, ...] = ()  # the tokenizer lies beside the model

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
        """All conversations of the run's files."""
        from trainer.data.chat import scan

        return scan(config, progress)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """The tokenizer."""
        from transformers import AutoTokenizer

        assert kind == "text", _NO_PIXELS
        return AutoTokenizer.from_pretrained(source.folder, local_files_only=True)

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`input_ids` (L,) int64 and, but for prompts, `loss_weight` (L,) fp32."""
        return language.encode(encoders, text, prompt=prompt, max_sequence_length=max_sequence_length)

    def caption_tokens(self, source: ModelSource) -> None:
        """None: `encode_text` refuses what is too long."""

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Never called."""
        raise AssertionError(_NO_PIXELS)

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Never called."""
        raise AssertionError(_NO_PIXELS)

    def vae_shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Never called."""
        raise AssertionError(_NO_PIXELS)

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """All conversations may share a row."""
        return ()

    def collate(self, text: Rows, latents: Rows) -> Batch:
        """One packed row."""
        return language.pack(text)

    def settings(self, source: ModelSource, config: RunConfig) -> None:
        """Nothing besides the batch."""
        return None

    def draw(self, settings: None, positions: Sequence[int], latents: Header) -> Draw | None:
        """Nothing is drawn."""
        return None

    def model_class(self, source: ModelSource) -> Any:
        """transformers' LlamaForCausalLM."""
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def predict(self, model: Any, batch: Batch, draw: Draw | None, settings: None) -> torch.Tensor:
        """Logits of the whole row, (1, T, vocabulary)."""
        logits: torch.Tensor = model.lm_head(language.hidden_states(model, batch))
        return logits

    def loss(self, model: Any, batch: Batch, draw: Draw | None, settings: None) -> torch.Tensor:
        """Cross entropy of the learned tokens, summed for each conversation."""
        return language.losses(model, batch)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """Two conversations of random tokens, all learned but the first of each."""
        import torch

        total, generator = shape.batch_size * shape.text_tokens, torch.Generator().manual_seed(seed)
        rows = []
        for length in (total // 2, total - total // 2):
            ids = torch.randint(config["vocab_size"], (length,), generator=generator)
            rows.append({"input_ids": ids, "loss_weight": (torch.arange(length) > 0).float()})
        return language.pack(rows)

    def preview(
        self,
        model: Any,
        source: ModelSource,
        encoders: Any,
        prompts: Sequence[PreviewPrompt],
        request: PreviewRequest,
        on_step: Callable[[], None],
    ) -> list[str]:
        """One answer a prompt through transformers' `generate`."""
        return language.answers(model, encoders, prompts, request, on_step)

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """As PEFT does: it prescribes the files' names, so `name` is not used."""
        return language.save_adapter(state, config, folder)

    def load_adapter(self, model: Any, path: Path, *, adapter_name: str) -> None:
        """With PEFT, onto the bare model."""
        language.load_adapter(model, path, adapter_name=adapter_name)

    def comfyui_keys(self, module: str) -> str | None:
        """ComfyUI draws images."""
        return None

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """The 8B's; `language.more_values` has what other bases keep more."""
        return self.name

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """A full row of conversations of usual length."""
        tokens = shape.batch_size * shape.text_tokens
        return AttentionShape(
            batch_size=1,
            heads=config["num_attention_heads"],
            head_width=_head_width(config),
            tokens=tokens,
            key_heads=config.get("num_key_value_heads", 0),
            causal=True,
            samples=max(1, tokens // language.USUAL_TOKENS),
            reach=min(tokens, language.USUAL_REACH),
        )


def _head_width(config: Mapping[str, Any]) -> int:
    """Width of one head; only newer configs say it."""
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


LLAMA = Llama()
