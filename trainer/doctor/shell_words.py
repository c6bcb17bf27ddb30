"""Shell text as words with lines, by a lexer of its own: nothing is run, expanded or looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.-]+))")
_ENDS = frozenset(";&|(){}\n")
"""Characters that end a command outside of quotes; a brace only as a word of its own."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word, without its quotes."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Shell:
    """The commands of a text."""

    commands: tuple[tuple[Word, ...], ...]
    broken: tuple[int, ...]
    """Lines with a backslash before blanks and the line's end or a comment: it continues nothing."""
    cut: tuple[tuple[int, Word], ...]
    """Lines of comments that end a command, each with the option that the next command begins with: it was
    meant for the one before.
    """


@dataclass(kw_only=True)
class _State:
    text: str
    place: int = 0
    line: int = 1
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    letters: list[str] | None = None
    """Letters of the word that has begun."""
    began: int = 1
    broken: list[int] = field(default_factory=list)
    cut: list[tuple[int, Word]] = field(default_factory=list)
    comment: int = 0
    """Line of the comment that ended the command before; 0 where none did."""
    in_array: bool = False
    """True in the brackets of NAME=(...)."""
    pending: list[tuple[str, bool]] = field(default_factory=list)
    """Ends of here-documents that begin behind this line, and whether tabs before them count."""

    def add(self, letters: str) -> None:
        if self.letters is None:
            self.letters, self.began = [], self.line
        self.letters.append(letters)

    def end_word(self) -> None:
        if self.letters is not None:
            self.words.append(Word(text="".join(self.letters), line=self.began))
            self.letters = None

    def end_command(self) -> None:
        self.end_word()
        if self.words:
            if self.comment and re.match(r"--?[A-Za-z]", self.words[0].text):
                self.cut.append((self.comment, self.words[0]))
            self.commands.append(tuple(self.words))
            self.words, self.comment = [], 0

    def take(self, end: int) -> str:
        """Text from the place to `end`, which is the new place; lines are counted."""
        found = self.text[self.place : end]
        self.line += found.count("\n")
        self.place = end
        return found


def read(text: str) -> Shell:
    """Commands of a shell text; whatever it is, it has some reading."""
    state = _State(text=text.replace("\r\n", "\n"))
    while state.place < len(state.text):
        _step(state)
    state.end_command()
    return Shell(commands=tuple(state.commands), broken=tuple(state.broken), cut=tuple(state.cut))


def _step(state: _State) -> None:
    """Read one letter, quote, escape, comment or here-document."""
    text, here = state.text, state.text[state.place]
    if here == "\\":
        _escape(state)
    elif here == "'":
        state.add("")
        end = text.find("'", state.place + 1)
        end = len(text) if end < 0 else end
        state.add(state.take(end)[1:])
        state.take(min(end + 1, len(text)))
    elif here == '"':
        _double(state)
    elif here == "$" and text.startswith(("$(", "${"), state.place):
        state.add("")
        state.add(state.take(_closing(text, state.place + 1)))
    elif here == "`":
        end = text.find("`", state.place + 1)
        state.add(state.take(len(text) if end < 0 else end + 1))
    elif here == "#" and state.letters is None:
        _comment(state)
    elif here in " \t":
        state.end_word()
        state.place += 1
    elif here in _ENDS:
        _end(state, here)
    elif here in "<>":
        _redirect(state)
    else:
        state.add(here)
        state.place += 1


def _comment(state: _State) -> None:
    """A comment, which ends the command: a line is continued into none, and a backslash in it continues none.

    In the brackets of an array it ends nothing.
    """
    text, line = state.text, state.line
    end = text.find("\n", state.place)
    end = len(text) if end < 0 else end
    before = text.rfind("\n", 0, state.place)
    goes_on = text.endswith("\\", 0, max(before, 0)) or text.endswith("\\", state.place, end)
    if goes_on and state.words and line not in state.broken and not state.in_array:
        state.end_command()
        state.comment = line
    state.take(end)


def _escape(state: _State) -> None:
    """A backslash: the next letter as it is, or the line goes on."""
    text, place = state.text, state.place
    if text.startswith("\\\n", place):
        state.take(place + 2)
        return
    rest = re.compile(r"\\[ \t]+(?=#|\n|\Z)").match(text, place)
    is_value = re.fullmatch(r"\w+=", "".join(state.letters or ())) is not None  # IFS=\ and the line's end
    if rest is not None and not is_value:
        state.broken.append(state.line)
        state.end_word()
        state.place = rest.end()
        return
    state.add("")
    state.add(state.take(min(place + 2, len(text)))[1:])


def _double(state: _State) -> None:
    """A text in double quotes."""
    text, place, letters = state.text, state.place + 1, list[str]()
    while place < len(text) and text[place] != '"':
        if text[place] == "\\" and place + 1 < len(text) and text[place + 1] in '"\\$`\n':
            letters.append("" if text[place + 1] == "\n" else text[place + 1])
            place += 2
        elif text.startswith(("$(", "${"), place):
            end = _closing(text, place + 1)
            letters.append(text[place:end])
            place = end
        else:
            letters.append(text[place])
            place += 1
    state.add("".join(letters))
    state.take(min(place + 1, len(text)))


def _closing(text: str, place: int) -> int:
    """The place behind the bracket that closes the one at `place`, but for those in quotes of a `$(`; the
    text's end where none does.
    """
    opening, closing = ("(", ")") if text[place] == "(" else ("{", "}")
    depth, quote, end = 0, "", place
    while end < len(text):
        letter = text[end]
        if letter == "\\" and quote != "'":
            end += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif opening == "(" and letter in "'\"":
            quote = letter
        else:
            depth += {opening: 1, closing: -1}.get(letter, 0)
        end += 1
        if depth == 0:
            return end
    return len(text)


def _end(state: _State, here: str) -> None:
    """A letter that ends the command; at a line's end here-documents follow."""
    if here in "{}" and state.letters is not None:
        state.add(here)  # within a word: a{b,c}
        state.place += 1
        return
    if here in "()":
        state.in_array = here == "(" and state.letters is not None and state.letters[-1:] == ["="]
    if here == ")":
        state.comment = 0  # a pattern of `case` is no option
    state.end_command()
    state.take(state.place + 1)
    if here != "\n":
        state.comment = 0
        return
    for end, tabs in state.pending:
        while state.place < len(state.text):
            stop = state.text.find("\n", state.place)
            line = state.take(len(state.text) if stop < 0 else stop + 1).rstrip("\n")
            if (line.lstrip("\t") if tabs else line) == end:
                break
    state.pending = []


def _redirect(state: _State) -> None:
    """`<` and `>` end a word; `<<WORD` names the end of a here-document."""
    if state.letters is not None and "".join(state.letters).isdecimal():
        state.letters = None  # a number of a file: 2>
    state.end_word()
    found = _HEREDOC.match(state.text, state.place)
    if found is not None and not state.text.startswith("<<<", state.place):
        state.pending.append((found[2] or found[3] or found[4], bool(found[1])))
        state.take(found.end())
        return
    while state.place < len(state.text) and state.text[state.place] in "<>&":
        state.place += 1
    while state.place < len(state.text) and state.text[state.place] in " \t":
        state.place += 1
    # the file's name is no word of the command
    while state.place < len(state.text) and state.text[state.place] not in " \t\n;|&()<>":
        state.place += 1
