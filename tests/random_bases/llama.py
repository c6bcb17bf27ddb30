"""Llama: two layers with grouped queries, and a tokenizer that writes conversations as Llama 3 does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.random_bases.common import CORPUS, Base, byte_pair_merges

# what conversations add to the captions' words
_CHAT = """
what is the, how do I, can you tell me, please, thank you, yes, no, the answer is, here is, one two three four
five, because, you are a helpful assistant that answers in short sentences, first, then, next, finally
"""
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# the layout of Llama 3, which has no marks around what the assistant generates
_TEMPLATE = """\
{%- for message in messages %}
    {{- (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}
    {{- '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""


def tokenizer(**options: Any) -> Any:
    """Byte pairs within words over all 256 bytes, so that any text comes back as it was; `options` are those
    of `make_tokenizer`.
    """
    # a word carries the blank before it; the marks of word ends that the merges bear are not used here
    words = Counter(f"Ġ{word}" for word in re.findall(r"[A-Za-z]+", CORPUS + _CHAT))
    found = byte_pair_merges(words, count=220)
    pairs = list(dict.fromkeys((left, right.removesuffix("</w>")) for left, right in found))
    return make_tokenizer(pairs, longest=1024, **options)


def make_tokenizer(
    pairs: Sequence[tuple[str, str]],
    *,
    longest: int,
    bos: str | None = _SPECIAL[0],
    eos: str = _SPECIAL[-1],
    others: Sequence[str] = _SPECIAL[1:-1],
    template: str = _TEMPLATE,
) -> Any:
    """All 256 bytes and what these pairs join; `longest` is its limit of tokens. Without pairs a token is a
    byte. `bos`, `eos` and `others` are its special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges: Any = list(pairs)  # annotated as lists of texts, documented as pairs
    model = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pieces = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=list(others),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def encoders(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Config keys of the model that its tokenizer decides."""
    made = tokenizers[""]
    return {
        "": {
            "vocab_size": len(made),
            "max_position_embeddings": made.model_max_length,
            "bos_token_id": made.bos_token_id,
            "eos_token_id": made.eos_token_id,
        }
    }


BASE = Base(tokenizers={"": tokenizer}, encoders=encoders, classes={"": ("transformers", "LlamaForCausalLM")})
