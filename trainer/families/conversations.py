"""Conversations as tokens, by the chat template of a causal language model's tokenizer, and which of them are
learned. torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, DataError
from trainer.families.values import EntryKind, Learn
from trainer.ways import chat_templates

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.modeling.base.source import ModelSource

# templates that write today's date would make every day's tokens others; this is the date that Llama 3.1's
# template writes where it is told none
_DATE = "26 Jul 2024"
_NOW = "strftime_now"
# the same for templates that ask for today by a function of transformers, in the formats that they ask in
_FIXED_NOW = (
    "{% macro strftime_now(format) %}{{ {'%Y-%m-%d': '2024-07-26', '%d %B %Y': '26 July 2024'}"
    ".get(format, '" + _DATE + "') }}{% endmacro %}"
)
_PLACE = "Zq9Zq9"
"""An answer that no template changes, to see what it writes before one."""
_MARK = re.compile(r"<\|[^\s|<>]+\|>|<(?:start|end)_of_turn>")
"""Texts that look like special tokens, in what a template of the user's writes."""
_SHORTEST = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
_log = logging.getLogger(__name__)


class ConversationError(DataError):
    """A conversation that is too long for a row, or that the chat template does not write; who knows its file
    says the place.
    """


def load_tokenizer(
    kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
) -> Any:
    """`Family.load_encoders`: the tokenizer, which lies beside the model."""
    assert kind == "text", "a language model has no pixels"
    tokenizer, problem = open_tokenizer(source)
    if problem:
        _log.warning("%s: %s", chat_templates.KEY, problem)
    return tokenizer


def open_tokenizer(source: ModelSource) -> tuple[Any, str]:
    """The tokenizer with the run's chat template, and marks of a template of the user's that it splits, in
    words. Raises ConfigError for a template that is none, and for a shipped one whose marks it splits.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    if source.chat_template is None:
        return tokenizer, ""
    if not source.chat_template.strip():
        raise ConfigError("the chat template is empty", where=chat_templates.KEY, remedy="correct the file")
    tokenizer.chat_template = source.chat_template
    name = chat_templates.name_of(source.chat_template)
    try:
        written: Any = tokenizer.apply_chat_template(_SHORTEST, tokenize=False, date_string=_DATE)
    except _template_errors() as error:
        what = f"the chat template does not write a conversation: {_said(error)}"
        raise ConfigError(what, where=chat_templates.KEY, remedy="correct the file") from error
    for message in _SHORTEST:
        if message["content"].casefold() not in written.casefold():
            what = f"the chat template leaves out what the {message['role']} says"
            remedy = "correct the file: it has to write the content of every message"
            raise ConfigError(what, where=chat_templates.KEY, remedy=remedy)
    marks: Sequence[str] = _MARK.findall(written) if name is None else chat_templates.marks(name)
    split = _split(tokenizer, marks)
    if not split:
        return tokenizer, ""
    taken = [one for one in chat_templates.names() if not _split(tokenizer, chat_templates.marks(one))]
    problem = f"the base's tokenizer does not have {', '.join(split)} as tokens, and splits them"
    remedy = f"templates whose marks it has: {', '.join(taken)}; or name a base that has these tokens"
    if name is not None:
        raise ConfigError(f"{name}: {problem}", where=chat_templates.KEY, remedy=remedy)
    return tokenizer, f"{problem}: generation ends at special tokens only ({remedy})"


def _template_errors() -> tuple[type[Exception], ...]:
    """Errors that a template can end with: Jinja's own, and those of Python's operators within it."""
    from jinja2 import TemplateError

    return (
        TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError
    )  # fmt: skip


def _said(error: Exception) -> str:
    """The error in words: the line of a template that is none, Python's name where the words say little."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"


def _split(tokenizer: Any, marks: Sequence[str]) -> list[str]:
    """Marks that are not one token each."""
    known = tokenizer.get_vocab()
    return [
        mark for mark in dict.fromkeys(marks) if mark not in known or len(_tokens(tokenizer, mark)[0]) > 1
    ]


def answer_end(tokenizer: Any) -> int | None:
    """The special token by which the chat template ends an answer; None where it writes none."""
    written = _render(tokenizer, _SHORTEST, opened=False).rstrip()
    ids, _ = _tokens(tokenizer, written)
    token = tokenizer.added_tokens_decoder.get(ids[-1])
    return ids[-1] if token is not None and token.special else None


def encode_text(
    tokenizer: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
) -> dict[str, torch.Tensor]:
    """`input_ids` (L,) int64 of a prompt, a user's message, up to where the assistant begins to write; of a
    conversation what `encode_conversation` gives where answers are learned. Raises DataError like it.
    """
    import torch

    if not prompt:
        return encode_conversation(tokenizer, text, max_sequence_length=max_sequence_length, learn="answers")
    messages = [{"role": "user", "content": text}]
    ids, _ = _tokens(tokenizer, _render(tokenizer, messages, opened=True))
    _require_fitting(messages, ids, max_sequence_length)
    return {"input_ids": torch.tensor(ids)}


def encode_conversation(
    tokenizer: Any, text: str, *, max_sequence_length: int, learn: Learn
) -> dict[str, torch.Tensor]:
    """`input_ids` (L,) int64 of a conversation (JSON) and `loss_weight` (L,) fp32: 1 for every token that is
    learned, else 0. These are the assistant's messages, or the last one, with what ends each of them, or all
    tokens but the first, which nothing predicts.

    Nothing is cut or left out: raises ConversationError for more than `max_sequence_length` tokens, for one
    that the template refuses, or does not render up to an answer that is learned as the beginning of the
    whole, and for a system message that it does not write.
    """
    import torch

    messages = json.loads(text)
    whole = _render(tokenizer, messages, opened=False)
    _require_system(tokenizer, messages, whole)
    ids, offsets = _tokens(tokenizer, whole)
    end = _missing_end(tokenizer, whole, ids, offsets)
    if learn == "all":
        weights = [0.0, *[1.0] * (len(ids) - 1)]
    else:
        weights = _weights(tokenizer, messages, whole, offsets, last_alone=learn == "last_answer")
    ids, weights = [*ids, *end], [*weights, *[1.0] * len(end)]
    _require_fitting(messages, ids, max_sequence_length)
    return {"input_ids": torch.tensor(ids), "loss_weight": torch.tensor(weights)}


def _require_system(tokenizer: Any, messages: Sequence[Mapping[str, str]], whole: str) -> None:
    """Raise ConversationError for system messages of which the template writes nothing into the `whole`."""
    written = "".join(whole.split())  # templates strip what they write, and some break its lines
    if all("".join(one["content"].split()) in written for one in messages if one["role"] == "system"):
        return
    # some escape it, or take a mark out of it: then other words would be written otherwise
    others = [{**one, "content": _PLACE} if one["role"] == "system" else one for one in messages]
    if _render(tokenizer, others, opened=False) == whole:
        raise ConversationError(
            f"the chat template leaves out the system message of {_named(messages)}",
            where=tokenizer.name_or_path,
            remedy=f"put its words before the first question, or name a template that writes it"
            f" ({chat_templates.KEY}), or leave it out",
        )


def _require_fitting(messages: Sequence[Mapping[str, str]], ids: Sequence[int], most: int) -> None:
    """Raise ConversationError for more tokens than a row has."""
    if len(ids) > most:
        raise ConversationError(
            f"{_named(messages)} has {len(ids)} tokens, more than data.max_sequence_length ({most})",
            remedy="raise data.max_sequence_length, or write data.on_long: skip, or cut",
        )


def token_counter(source: ModelSource) -> Callable[[str], int]:
    """`Family.conversation_tokens`: the tokens that `encode_text` makes of a conversation (JSON), counted.

    One that the template refuses counts as a token: encoding refuses it with its place.
    """
    tokenizer, _ = open_tokenizer(source)

    def count(text: str) -> int:
        try:
            whole = _render(tokenizer, json.loads(text), opened=False)
        except ConversationError:
            return 1
        ids, offsets = _tokens(tokenizer, whole)
        return len(ids) + len(_missing_end(tokenizer, whole, ids, offsets))

    return count


def _tokens(tokenizer: Any, whole: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of a rendered text, and the characters of each: first one and end."""
    # verbose would warn of lengths that are checked here
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoding = tokenizer(whole, **options)
    return list(encoding["input_ids"]), encoding["offset_mapping"]


def _missing_end(
    tokenizer: Any, whole: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> list[int]:
    """The end token, where the template does not end the last answer by a special token; else nothing."""
    written = len(whole.rstrip())
    if not written:
        raise DataError(
            "the chat template writes nothing of a conversation",
            where=tokenizer.name_or_path,
            remedy="use a model that was made for chats, or correct its chat_template.jinja",
        )
    last = max(number for number, (start, _) in enumerate(offsets) if start < written)
    token = tokenizer.added_tokens_decoder.get(ids[last])
    if token is not None and token.special:
        return []
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the chat template does not end answers, and the tokenizer has no end token",
            where=tokenizer.name_or_path,
            remedy="give it an `eos_token`",
        )
    return [tokenizer.eos_token_id]


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, opened: bool) -> str:
    """The template's text; `opened` up to where the assistant begins to write."""
    if not tokenizer.chat_template:
        raise DataError(
            "the base model's tokenizer has no chat template",
            where=tokenizer.name_or_path,
            remedy=f"name one: {chat_templates.KEY}: {', '.join(chat_templates.names())}, or FILE.jinja;"
            " or use a model that was made for chats",
        )
    template = tokenizer.chat_template
    if isinstance(template, str) and _NOW in template:
        template = _FIXED_NOW + template
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template if isinstance(template, str) else None,
            tokenize=False,
            add_generation_prompt=opened,
            date_string=_DATE,
        )
    except _template_errors() as error:
        raise ConversationError(
            f"the chat template refuses {_named(messages)}: {_said(error)}",
            where=tokenizer.name_or_path,
            remedy="correct or remove the conversation",
        ) from error


def _named(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation for people: many begin with the same system message."""
    asked = next((message["content"] for message in messages if message["role"] == "user"), "")
    return f"the conversation with {asked[:60]!r}"


def _answer(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], whole: str, index: int
) -> tuple[int, int] | None:
    """The characters of an assistant's message, with what ends it, in the `whole`: first one and end; None
    where the template does not write the conversation up to it as the beginning of the whole.
    """
    before = _render(tokenizer, messages[:index], opened=True)
    after = _render(tokenizer, messages[: index + 1], opened=False)
    if not after.startswith(before):
        # models that reason are opened with a thought, which an answer without one does not have
        answered, opened = [*messages[:index], {"role": "assistant", "content": _PLACE}], before
        before, found, _ = _render(tokenizer, answered, opened=False).rpartition(_PLACE)
        if not (found and opened.startswith(before) and after.startswith(before)):
            return None
    return (len(before), len(after.rstrip())) if whole.startswith(after) else None


def _weights(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], whole: str, offsets: Any, *, last_alone: bool
) -> list[float]:
    """1 for every token of the assistant's messages, or of the last one, and of what ends each of them,
    without blanks, else 0.
    """
    learned = bytearray(len(whole) + 1)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in answers[-1:] if last_alone else answers:
        found = _answer(tokenizer, messages, whole, index)
        if found is None:
            last = None if index == answers[-1] else _answer(tokenizer, messages, whole, answers[-1])
            raise ConversationError(
                f"the chat template writes {_named(messages)} otherwise once it goes on, so that message "
                f"{index + 1} cannot be found in it",
                where=tokenizer.name_or_path,
                remedy=f"write data.learn: {'all' if last is None else 'last_answer'}, or use a template "
                "that only appends, as Llama 3's",
            )
        start, end = found
        learned[start:end] = b"\1" * (end - start)
    # one character may be several tokens, and some tokens have no character
    weights = [float(any(learned[start : max(end, start + 1)])) for start, end in offsets]
    weights[0] = 0.0  # nothing predicts it
    return weights
