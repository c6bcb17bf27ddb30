"""Formats of a conversation's record, each a row of data, and the messages that a record holds.

`messages` is OpenAI's, ShareGPT has `conversations` of from and value, alpaca has `instruction`, `input`,
`output`, `system` and `history`. Other keys of a record are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.data.caption_text import TextError

Messages = list[dict[str, str]]
"""A conversation in our form: {"role", "content"} by message, roles of `ROLES`."""
ROLES = ("system", "user", "assistant")
# keys of a message that would change what is learned, and the values with which they change nothing
_UNREAD_KEYS: dict[str, tuple[object, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "reasoning_content": (None, ""),
    "reasoning": (None, ""),
    "thinking": (None, ""),
    # said of a message that it is not to be learned: `data.learn` says it of all
    "weight": (None, 1),
    "train": (None, True),
    "loss": (None, True),
}
FEEDBACK = ("label", "kto_tag")
"""Keys of KTO's records, whose answers are to be unlearned where they say false."""
_MOST_NAMED = 8
"""Most keys of a record that an error names."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Keys of one message, and the words for roles that stand below them."""

    role: str
    content: str
    roles: Mapping[str, str]
    """Our role by the file's word for it."""


_OWN_ROLES = {role: role for role in ROLES}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **_OWN_ROLES}
OPENAI_TAGS = Tags(role="role", content="content", roles=_OWN_ROLES)
SHAREGPT_TAGS = (
    Tags(role="from", content="value", roles=_SHAREGPT_ROLES),
    Tags(role="role", content="content", roles=_SHAREGPT_ROLES),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys under which a file's records hold their conversations; empty for one that is not read.

    Either `messages` is named, or `prompt` and `response` are.
    """

    name: str
    """The format's name in the log and in errors."""
    shape: str
    """A record as it is to be written."""
    messages: str = ""
    tags: tuple[Tags, ...] = ()
    """Ways to write a message, told apart by the first message's keys; the first one where none fits."""
    prompt: str = ""
    query: str = ""
    """Second part of the question, put below `prompt`."""
    response: str = ""
    history: str = ""
    """Earlier pairs of question and answer."""
    system: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of a record that are read."""
        named = (self.messages, self.prompt, self.query, self.response, self.history, self.system)
        return tuple(filter(None, named))

    @property
    def marks(self) -> tuple[str, ...]:
        """Keys of which a record of this format has one at least."""
        return (self.messages,) if self.messages else (self.prompt, self.response)


OPENAI = Layout(
    name="messages",
    shape='{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}',
    messages="messages",
    tags=(OPENAI_TAGS,),
)
SHAREGPT = Layout(
    name="ShareGPT",
    shape='{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}',
    messages="conversations",
    tags=SHAREGPT_TAGS,
)
ALPACA = Layout(
    name="alpaca",
    shape='{"instruction": "Translate to French.", "input": "Hello!", "output": "Bonjour !"}',
    prompt="instruction",
    query="input",
    response="output",
    history="history",
    system="system",
)
LAYOUTS = (OPENAI, SHAREGPT, ALPACA)
"""Formats that are found by content: a record that has the marks of several is of the first of them."""


def layout_of_columns(columns: Mapping[str, str], tags: tuple[Tags, ...] = SHAREGPT_TAGS) -> Layout:
    """The layout of records whose keys bear other names: only what `columns` names is read.

    Messages are written in one of `tags`.
    """
    name = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    if "messages" in columns:
        first, roles = tags[0], list(tags[0].roles.items())
        turns = (("user", "Hi"), ("assistant", "Hello!"))
        words = {role: next(word for word, ours in roles if ours == role) for role, _ in turns}
        texts = [{first.role: words[role], first.content: text} for role, text in turns]
        shape = json.dumps({columns["messages"]: texts})
        system = columns.get("system", "")
        return Layout(name=name, shape=shape, messages=columns["messages"], system=system, tags=tags)
    return Layout(
        name=name,
        shape=json.dumps({columns["prompt"]: "Hi", columns["response"]: "Hello!"}),
        prompt=columns["prompt"],
        query=columns.get("query", ""),
        response=columns["response"],
        history=columns.get("history", ""),
        system=columns.get("system", ""),
    )


def find_layout(record: Mapping[str, Any]) -> Layout:
    """The format of a record by its keys; a null counts as absent. Raises TextError for a record of none, and
    for one whose answer is marked as a bad one.
    """
    for key in FEEDBACK:
        if record.get(key) is False:
            what = f"the row has `{key}: false`, by which KTO marks an answer to unlearn"
            raise TextError(what, "remove the row, or the key; or say by `columns` which keys are read")
    for layout in LAYOUTS:
        if any(record.get(key) is not None for key in layout.marks):
            return layout
    what = "the row has no `messages`, `conversations` or `instruction`"
    keys = ", ".join(list(record)[:_MOST_NAMED]) or "none"
    raise TextError(
        what, f"write {OPENAI.shape}, or say by the set's `columns` which of its keys hold them: {keys}"
    )


def messages_of(record: Mapping[str, Any], layout: Layout) -> Messages:
    """The conversation of a record, checked to have an answer to learn from. Raises TextError."""
    found = _listed(record, layout) if layout.messages else _paired(record, layout)
    system = _text(record, layout.system)
    if system and found[0]["role"] == "system" and found[0]["content"] != system:
        what = f"the row has a system message, and another one as `{layout.system}`"
        raise TextError(what, "remove one of them")
    if system and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": system})
    return found


def as_text(messages: Messages) -> str:
    """A conversation as a record's caption: JSON, the same text for the same messages."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def _listed(record: Mapping[str, Any], layout: Layout) -> Messages:
    """Messages that a record holds as a list."""
    listed = record.get(layout.messages)
    if listed is None:
        raise TextError(f"the row has no `{layout.messages}`", f"write {layout.shape}")
    if not isinstance(listed, list) or not listed:
        raise TextError("the messages are no list, or an empty one", f"write {layout.shape}")
    first = listed[0] if isinstance(listed[0], dict) else {}
    # a table has every key in every message, and null where a message lacks it
    tags = next((one for one in layout.tags if first.get(one.role) is not None), layout.tags[0])
    messages = [_message(number, one, tags, layout.shape) for number, one in enumerate(listed, start=1)]
    roles = [message["role"] for message in messages]
    if next((role for role in roles if role != "system"), "") == "assistant":
        place = "" if roles[0] == "assistant" else " after the system's"
        what = f"the first message{place} is the assistant's, and nothing is asked before it"
        raise TextError(what, "remove it, or begin with a message of the user")
    if "assistant" not in roles:
        raise TextError("no message is the assistant's: there is nothing to learn", "add its answer")
    if roles[-1] != "assistant":
        what = f"the last message is the {roles[-1]}'s, and nothing answers it"
        raise TextError(what, "add the assistant's answer, or remove the message")
    return messages


def _message(number: int, value: object, tags: Tags, shape: str) -> dict[str, str]:
    """One message as {"role", "content"}."""
    if not isinstance(value, dict):
        raise TextError(f"message {number} is not a JSON object", f"write {shape}")
    role, content = value.get(tags.role), value.get(tags.content)
    if not isinstance(role, str) or role not in tags.roles:
        remedy = f"`{tags.role}` is one of {', '.join(tags.roles)}"
        foreign = isinstance(role, str) and role in _SHAREGPT_ROLES
        if tags is OPENAI_TAGS and (foreign or SHAREGPT_TAGS[0].role in value):
            remedy += "; the set's `columns: {messages: messages}` reads ShareGPT's words too"
        what = f"no `{tags.role}`" if role is None else f"an unknown role: {role!r}"
        raise TextError(f"message {number} has {what}", remedy)
    for key, harmless in _UNREAD_KEYS.items():
        if value.get(key) not in harmless:
            what = f"message {number} has `{key}`, which is not read"
            raise TextError(what, "remove the key, or the conversation; only text is learned")
    if not isinstance(content, str):
        what = f"the content of message {number} is not a text"
        raise TextError(what, f"write `{tags.content}` as one text")
    if not content.strip():
        raise TextError(f"the content of message {number} is empty", "write it, or remove the conversation")
    return {"role": tags.roles[role], "content": content}


def _paired(record: Mapping[str, Any], layout: Layout) -> Messages:
    """Earlier pairs of a record, its question (`prompt` with `query` on the next line) and its answer."""
    pairs = _history(record, layout.history)
    asked = [text for key in (layout.prompt, layout.query) if (text := _text(record, key))]
    answer = _text(record, layout.response)
    if not asked:
        names = f"`{layout.prompt}`" + (f" and `{layout.query}` are" if layout.query else " is")
        raise TextError(f"{names} empty or missing: nothing is asked", f"write {layout.shape}")
    if not answer:
        what = f"`{layout.response}` is empty or missing: there is nothing to learn"
        raise TextError(what, f"add the answer: {layout.shape}")
    pairs.append(("\n".join(asked), answer))
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _history(record: Mapping[str, Any], key: str) -> list[tuple[str, str]]:
    """Pairs of question and answer before the last one."""
    listed = record.get(key) if key else None
    if listed is None:
        return []
    remedy = f'write `{key}` as [["Hi", "Hello!"], ...]'
    if not isinstance(listed, list):
        raise TextError(f"`{key}` is no list", remedy)
    for number, pair in enumerate(listed, start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TextError(f"pair {number} of `{key}` is not a list of a question and an answer", remedy)
        if not all(text.strip() for text in pair):
            raise TextError(f"pair {number} of `{key}` has an empty text", "write it, or remove the pair")
    return [(asked, answered) for asked, answered in listed]


def _text(record: Mapping[str, Any], key: str) -> str:
    """The text below a key; empty where it is blank, null or absent, or where no key is named."""
    value = record.get(key) if key else None
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TextError(f"`{key}` is not a text", "write it as one text")
    return value if value.strip() else ""
