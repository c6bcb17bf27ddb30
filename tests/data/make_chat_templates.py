"""Record how others write conversations, as the oracle of the chat templates that are shipped.

    pip download --no-deps -d DIR llamafactory trl unsloth; cd DIR; for f in *.whl; do unzip -qo $f; done
    python tests/data/make_chat_templates.py DIR > tests/data/chat_templates.json

LLaMA-Factory writes conversations by code of its own; trl and unsloth hold the published templates, which
transformers' `apply_chat_template` renders here. Nothing of theirs is kept but what they write.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why is the sky blue?\nIn one line."},
        {"role": "assistant", "content": "Light scatters."},
    ],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two,\n\nthree."},
        {"role": "user", "content": "And then? { } %"},
        {"role": "assistant", "content": "Vier, fünf."},
    ],
]
PADDED = [{"role": "user", "content": "  Hi \n"}, {"role": "assistant", "content": " Hello! "}]
STANFORD = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
BOS, EOS = "<bos>", "<eos>"
FACTORY = {"llama3": "llama3", "chatml": "chatml", "mistral": "mistral", "gemma": "gemma"}
"""Our names, and LLaMA-Factory's."""


def tokenizer() -> Any:
    """A tokenizer of bytes with the marks of all templates."""
    from tests.random_bases.llama import make_tokenizer

    made = make_tokenizer([], longest=4096)
    made.add_special_tokens({"bos_token": BOS, "eos_token": EOS})
    return made


def factory(folder: Path, made: Any) -> dict[str, Any]:
    """LLaMA-Factory's own writing, by its module of templates alone."""
    for name in ("llamafactory", "llamafactory.data", "llamafactory.extras"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    log: Any = types.ModuleType("llamafactory.extras.logging")
    log.get_logger = logging.getLogger
    misc: Any = types.ModuleType("llamafactory.extras.misc")
    misc.check_version = lambda *arguments, **options: None
    plugin: Any = types.ModuleType("llamafactory.data.mm_plugin")
    plugin.get_mm_plugin = lambda *arguments, **options: None
    words: Any = types.ModuleType("llamafactory.data.data_utils")
    words.SLOTS = list
    words.Role = importlib.import_module("enum").Enum(
        "Role", {n: n.lower() for n in ("USER", "ASSISTANT", "SYSTEM", "FUNCTION", "OBSERVATION")}, type=str
    )
    for module in (log, misc, plugin, words):
        sys.modules[module.__name__] = module
    templates = importlib.import_module("llamafactory.data.template").TEMPLATES
    found = {}
    for ours, theirs in FACTORY.items():
        texts = []
        for chat in CHATS:
            system = chat[0]["content"] if chat[0]["role"] == "system" else None
            turns = [one for one in chat if one["role"] != "system"]
            pairs = templates[theirs].encode_multiturn(made, turns, system)
            texts.append("".join(made.decode([*asked, *answered]) for asked, answered in pairs))
        found[f"{ours}: LLaMA-Factory {version(folder, 'llamafactory')}, {theirs}"] = texts
    return found


def published(folder: Path, made: Any) -> dict[str, Any]:
    """Published templates, rendered by transformers; with a conversation whose texts have blanks around."""
    source = (folder / "unsloth" / "chat_templates.py").read_text()
    texts = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("zephyr_template", "chatml_template", "alpaca_template")
    }
    trl = folder / "trl" / "chat_templates"
    rows = {
        f"llama3: trl {version(folder, 'trl')}, llama3.jinja": (trl / "llama3.jinja").read_text(),
        f"gemma: trl {version(folder, 'trl')}, gemma3.jinja": (trl / "gemma3.jinja").read_text(),
        f"zephyr: unsloth {version(folder, 'unsloth')}, zephyr": texts["zephyr_template"],
        f"chatml: unsloth {version(folder, 'unsloth')}, chatml": texts["chatml_template"],
        # the prompt that Stanford's Alpaca was trained with, in the place that is left for one
        f"alpaca: unsloth {version(folder, 'unsloth')}, alpaca": texts["alpaca_template"].replace(
            "{system_message}", STANFORD
        ),
    }
    found = {}
    for name, text in rows.items():
        made.chat_template = text
        chats = [*CHATS, PADDED]
        found[name] = [made.apply_chat_template(chat, tokenize=False) for chat in chats]
        opened = made.apply_chat_template(CHATS[2][:2], tokenize=False, add_generation_prompt=True)
        found[name].append(opened)
    return found


def version(folder: Path, package: str) -> str:
    """The version of a package that was unpacked here."""
    return next(folder.glob(f"{package}-*.dist-info")).name.removeprefix(f"{package}-").partition(".dist")[0]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = tokenizer()
    rows = {**factory(folder, made), **published(folder, made)}
    print(json.dumps({"chats": CHATS, "padded": PADDED, "written": rows}, indent=1, ensure_ascii=False))
