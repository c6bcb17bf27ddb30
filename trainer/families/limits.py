"""How many tokens of a caption count against `data.max_sequence_length`, by the tokenizer alone.

What a family's prompt encoding cuts is told by these before any encoder loads. transformers and diffusers are
imported inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.modeling.base.source import ModelSource

Count = Callable[[str], int]
"""Tokens of one caption."""


def counted(component: str, tokenizer: str, *, after: str = "") -> Callable[[ModelSource], Count]:
    """Tokens of the caption with `after` behind it, special ones included.

    `component` is the tokenizer's folder, `tokenizer` its class in transformers, `after` the end of a
    template whose beginning does not count.
    """

    def open_tokenizer(source: ModelSource) -> Count:
        import transformers

        loaded = getattr(transformers, tokenizer).from_pretrained(source.component(component))
        # a processor reads pictures besides; its texts are its tokenizer's
        reader = loaded.tokenizer if isinstance(loaded, transformers.ProcessorMixin) else loaded
        return lambda text: len(reader(text + after, verbose=False).input_ids)

    return open_tokenizer


def counted_in_chat(component: str, processor: str) -> Callable[[ModelSource], Count]:
    """Tokens of the caption as a chat, the system's message included: Flux2Pipeline cuts all of it."""

    def open_processor(source: ModelSource) -> Count:
        import transformers
        from diffusers.pipelines.flux2 import pipeline_flux2 as pipeline
        from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

        loaded = getattr(transformers, processor).from_pretrained(source.component(component))

        def count(text: str) -> int:
            messages = pipeline.format_input(prompts=[text], system_message=SYSTEM_MESSAGE)
            options = {"add_generation_prompt": False, "tokenize": True, "return_dict": True}
            return len(loaded.apply_chat_template(messages, **options)["input_ids"][0])

        return count

    return open_processor
