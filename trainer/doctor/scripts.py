"""Shell scripts and Dockerfiles as entries: variables, launchers with their options, instructions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.config import secrets
from trainer.doctor import recognise, shell_words
from trainer.doctor.entries import Document, Entry
from trainer.doctor.shell_words import Word

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEFORE = _words(
    "then do else elif if while until ! time exec nohup sudo env command stdbuf nice numactl srun timeout uv"
    " conda mamba micromamba poetry pipenv pixi pdm hatch"
)
"""Words before a command that do not change which it is; options may follow them."""
_OF_THOSE = re.compile(r"-.*|[\d.]+[smhd]?|run")
"""Their options, a time, and `run` of `uv` and its like."""
_PYTHON_SWITCH = re.compile(r"-[BEIOSqsuv]+")
_LAUNCHERS = _words("accelerate accelerate-launch torchrun deepspeed llamafactory-cli axolotl trainer")
_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?")
_SWITCHES = _words(
    "module m no_python multi_gpu cpu use_deepspeed use_fsdp use_megatron_lm debug quiet standalone tpu"
    " same_network no_local_rank save_pid enable_each_rank_log use_cpu dynamo_use_fullgraph"
    " dynamo_use_dynamic force_multi no_ssh"
)
"""Options of launchers that take no value."""
_DOCKER_SWITCH = re.compile(
    r"-[ditPq]+|--(?:rm|detach|interactive|tty|privileged|init|read-only|no-healthcheck|oom-kill-disable"
    r"|publish-all|quiet)"
)
"""Options of `docker run` that take no value."""
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_ARGUMENT = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_DEFAULT = re.compile(r"\$\{\w+:?[-=]([^$}]*)\}")
"""Value that holds unless somebody sets the variable: `${NAME:-1}`."""
_MORE = re.compile(r"\$(?:[@*]|\{?\w*(?:ARG|OPT|EXTRA|FLAG)\w*|\{\w+\[[@*]\])", re.IGNORECASE)
"""Variable that holds options by its name, also where it stands behind one."""
_ARGUMENTS_FILE = re.compile(r".*\.(?:ya?ml|json|args)")
_NAMES_FILE = _words("config config_file config_path args_file cfg")
"""Options whose value is a file of arguments."""
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s+(.*)", re.DOTALL)
_DOCKER_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")


def script(text: str, place: str) -> Iterator[Document]:
    """The script, and the training arguments of each launcher in it."""
    shell = shell_words.read(text)
    found = [Entry(path=("continuation", str(line)), value="broken", line=line) for line in shell.broken]
    found += [Entry(path=("comment", str(line)), value=word.text, line=line) for line, word in shell.cut]
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        found.append(Entry(path=("line_ends",), value="crlf", line=line))
    training: list[Document] = []
    for number, command in enumerate(shell.commands, 1):
        found += _variables(command)
        words = _plain(command)
        if words and words[0].text.rpartition("/")[2] == "docker":
            found += _docker_run(words, str(number))
        # in a text for another shell, or in a variable, it starts all the same
        found += (
            Entry(path=("launcher", "name"), value="accelerate", line=word.line)
            for word in command
            if re.search(r"\baccelerate(?:\.commands\.launch|\s+launch)\b", word.text)
        )
        launched, options = _launched(words)
        found += launched
        found += () if options else _secrets(command)
        # who parses by DeepSpeed's own arguments is no Trainer of HF, whose words the others are
        if options and not any(option.name == "deepspeed_config" for option in options):
            is_whole = recognise.is_trainers([option.name for option in options]) and not _goes_on(words)
            one = Document(kind="arguments", place=place, entries=tuple(options), has_defaults=is_whole)
            training.append(one)
    yield Document(kind="script", place=place, entries=tuple(found))
    yield from training


def dockerfile(text: str, place: str) -> Document:
    """The instructions of a Dockerfile; `last.USER` is the user that its containers have."""
    found: list[Entry] = []
    user: Entry | None = None
    for line, instruction, rest in _instructions(text):
        if instruction in ("ENV", "ARG"):
            found += _named(instruction, rest, line)
        elif instruction == "FROM":
            found.append(Entry(path=(instruction,), value=_with_defaults(rest, found), line=line))
        else:
            found.append(Entry(path=(instruction,), value=rest, line=line))
        if instruction == "RUN":
            commands = shell_words.read(rest).commands
            found += (replace(one, line=line + one.line - 1) for words in commands for one in _secrets(words))
        if instruction == "USER":
            user = Entry(path=("last", "USER"), value=rest.strip(), line=line)
        elif instruction == "FROM":
            user = None
    return Document(kind="dockerfile", place=place, entries=tuple(found + ([user] if user else [])))


def _with_defaults(image: str, before: Sequence[Entry]) -> str:
    """The rest of a FROM, in which `$NAME` and `${NAME}` are the defaults of the ARGs before it."""
    defaults = {entry.name: entry.value for entry in before if entry.path[0] == "arg" and entry.value}
    return _ARGUMENT.sub(lambda one: defaults.get(one[1] or one[2], one[0]), image)


def variables(text: str, place: str) -> Document:
    """Lines NAME=VALUE, as `env` prints them and .env files hold them."""
    found: list[Entry] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _ASSIGNMENT.fullmatch(line.strip().removeprefix("export "))
        if match:
            found.append(Entry(path=("env", match[1]), value=match[2].strip("\"'"), line=number))
    return Document(kind="environment", place=place, entries=tuple(found))


def _variables(command: Sequence[Word]) -> Iterator[Entry]:
    """Variables that a command sets: before itself, or by `export`."""
    words = list(command)
    while words and words[0].text in _BEFORE:
        words.pop(0)
    exports = bool(words) and words[0].text in ("export", "declare", "typeset", "readonly")
    for word in words[exports:]:
        match = _ASSIGNMENT.fullmatch(word.text)
        if match:
            default = _DEFAULT.fullmatch(match[2])
            yield Entry(path=("env", match[1]), value=default[1] if default else match[2], line=word.line)
        elif not (exports and word.text.startswith("-")):
            return


def _secrets(command: Sequence[Word]) -> Iterator[Entry]:
    """Words that are a token by their form, or what logs in at W&B; those of variables have their name."""
    words = [word.text for word in command]
    for position, word in enumerate(command):
        value = word.text.partition("=")[2] if word.text.startswith("-") else word.text
        logs_in = words[max(position - 2, 0) : position] == ["wandb", "login"] and re.fullmatch(
            "[0-9a-f]{40}", value
        )
        if secrets.is_known_form(value) or logs_in:
            yield Entry(path=("secret",), value=value, line=word.line)


def _plain(command: Sequence[Word]) -> list[Word]:
    """A command from its program on: without variables, words like `srun`, and options of these."""
    is_behind = takes_value = False
    for position, word in enumerate(command):
        name = word.text.rpartition("/")[2]
        if name in _LAUNCHERS or name == "docker" or _PYTHON.fullmatch(name):
            return list(command[position:])
        is_option = is_behind and _OF_THOSE.fullmatch(word.text)
        known = word.text in _BEFORE or _ASSIGNMENT.fullmatch(word.text)
        if not (known or is_option or takes_value):
            return list(command[position:])
        is_behind = is_behind or word.text in _BEFORE
        takes_value = bool(is_option) and name.startswith("-") and "=" not in name
    return []


def _docker_run(words: Sequence[Word], number: str) -> Iterator[Entry]:
    """Options of a `docker run`, the script's command of that number, about shared memory and GPUs."""
    if not any(word.text in ("run", "create") for word in words[1:4]):
        return
    whole = " ".join(word.text for word in words)
    yield Entry(path=("docker", number, "run"), value=whole, line=words[0].line)
    position = next(at for at, word in enumerate(words) if word.text in ("run", "create")) + 1
    # options end at the image; a variable may hold some
    while position < len(words) and words[position].text.startswith(("-", "$")):
        word = words[position]
        name, is_set, value = word.text.partition("=")
        alone = is_set or name.startswith("$") or _DOCKER_SWITCH.fullmatch(name)
        position += 1 if alone else 2
        if name in ("--ipc", "--shm-size", "--gpus", "-e", "--env"):
            value = value or (words[position - 1].text if position <= len(words) else "")
            if name in ("-e", "--env"):
                variable, is_set, text = value.partition("=")
                if is_set:
                    yield Entry(path=("env", variable), value=text, line=word.line)
            else:
                yield Entry(path=("docker", number, name.lstrip("-")), value=value, line=word.line)


def _launched(words: Sequence[Word]) -> tuple[list[Entry], list[Entry]]:
    """Entries of a launcher with its options, and the options of the program that it starts."""
    name = words[0].text.rpartition("/")[2] if words else ""
    if _PYTHON.fullmatch(name):
        name = "python"
    elif name not in _LAUNCHERS:
        return [], []
    line, rest = words[0].line, list(words[1:])
    if name in ("accelerate", "llamafactory-cli", "axolotl", "trainer"):
        if not rest or (name == "accelerate" and rest[0].text != "launch"):
            return [], []
        rest = rest[1:]
    elif name == "accelerate-launch":
        name = "accelerate"
    if name == "python":
        rest = list(itertools.dropwhile(lambda word: _PYTHON_SWITCH.fullmatch(word.text), rest))
    if name == "python" and len(rest) > 1 and rest[0].text == "-m":
        started = rest[1].text
        if started in ("torch.distributed.run", "torch.distributed.launch"):
            name, rest = "torchrun", rest[2:]
        elif started == "accelerate.commands.launch":
            name, rest = "accelerate", rest[2:]
    if name in ("llamafactory-cli", "axolotl", "trainer"):
        own, options = list[Entry](), _options(rest)
    else:
        own, options = _split(rest)
    if name == "python" and not any(word.text.endswith(".py") or word.text == "-m" for word in rest):
        return [], []
    found = [Entry(path=("launcher", "name"), value=name, line=line)]
    found += [Entry(path=("launcher", *one.path), value=one.value, line=one.line) for one in own]
    processes = [one for one in own if one.name in _PROCESSES]
    found += [Entry(path=("launcher", "processes"), value=one.value, line=one.line) for one in processes]
    return found, options


def _split(words: Sequence[Word]) -> tuple[list[Entry], list[Entry]]:
    """A launcher's own options, and those of the program behind it."""
    position = 0
    while position < len(words):
        text = words[position].text
        if not text.startswith("-"):
            return _options(words[:position]), _options(words[position + 1 :])
        name = text.lstrip("-").replace("-", "_")
        if name in ("m", "module"):
            return _options(words[:position]), _options(words[position + 2 :])
        after = words[position + 1].text if position + 1 < len(words) else ""
        position += 1 if "=" in text or name in _SWITCHES or after.endswith(".py") else 2
    return _options(words), []


def _options(words: Sequence[Word]) -> list[Entry]:
    """Options as keys; one without a value is true."""
    found: list[Entry] = []
    for position, word in enumerate(words):
        if not re.match(r"--?[A-Za-z]", word.text):
            continue
        name, is_set, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not is_set:
            after = words[position + 1].text if position + 1 < len(words) else ""
            takes = after and not re.match(r"--?[A-Za-z]", after) and name not in _SWITCHES
            value = after if takes else "true"
        found.append(Entry(path=(name,), value=value, line=word.line))
    return found


def _goes_on(words: Sequence[Word]) -> bool:
    """True where arguments of the program that a command starts may stand elsewhere: in a variable, or in a
    file that it names.
    """
    program = next((at for at, word in enumerate(words) if word.text.endswith(".py")), 0)
    before = ""
    for word in words[program + 1 :]:
        is_value = before.startswith("-") and "=" not in before
        if word.text.startswith(("$", "`")) and (not is_value or _MORE.match(word.text)):
            return True
        if not is_value and not word.text.startswith("-") and _ARGUMENTS_FILE.fullmatch(word.text):
            return True
        before = word.text
        if before.startswith("-") and before.lstrip("-").partition("=")[0].replace("-", "_") in _NAMES_FILE:
            return True
    return False


def _named(instruction: str, rest: str, line: int) -> Iterator[Entry]:
    """Variables of ENV and ARG, also in the old form `ENV NAME value`."""
    kind = "env" if instruction == "ENV" else "arg"
    words = [word for command in shell_words.read(rest).commands for word in command]
    if words and "=" not in words[0].text:
        value = rest.strip()[len(words[0].text) :].strip()
        yield Entry(path=(kind, words[0].text), value=value, line=line)
        return
    for word in words:
        name, _, value = word.text.partition("=")
        yield Entry(path=(kind, name), value=value, line=line + word.line - 1)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and rest of each instruction; lines that go on keep their breaks, comments are left out."""
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        first, parts = position, list[str]()
        while position < len(lines):
            line = lines[position]
            position += 1
            if line.lstrip().startswith("#") or (parts and not line.strip()):
                parts += [""] if parts else []
                if not parts:
                    first = position
                continue
            goes_on = line.rstrip().endswith("\\")
            parts.append(line.rstrip()[:-1] if goes_on else line)
            if not goes_on:
                break
        found = _INSTRUCTION.fullmatch("\n".join(parts))
        if found is None:
            continue
        rest = found[2]
        for end in _DOCKER_HEREDOC.findall(rest) if found[1].upper() in ("RUN", "COPY", "ADD") else ():
            body = lines[position:]
            count = next((at for at, one in enumerate(body) if one.strip() == end), len(body))
            rest += "\n" + "\n".join(body[:count])
            position += count + 1
        yield first + 1, found[1].upper(), rest
