"""Write docs/coming-from.md anew from the table of other trainers' words, trainer/config/elsewhere.yaml.

python -m scripts.render_coming_from
"""

from __future__ import annotations

from pathlib import Path

from trainer.config import elsewhere
from trainer.config.elsewhere import Foreign, Row
from trainer.words.tables import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
_HEAD = """# Coming from elsewhere

Written by `make docs` from `trainer/config/elsewhere.yaml`. The left columns are words of kohya-ss
sd-scripts, ai-toolkit, SimpleTuner, OneTrainer, musubi-tuner, x-flux, diffusers' example scripts and images
for single machines. A key of theirs in a configuration, in `--set` or in `TRAINER__...` is an error (exit
code 78) that says what this page says: it is never ignored. Capitals and hyphens do not count. `trainer
config template FAMILY` prints a file with every key of ours.

Small overlays are chosen by `--preset NAME[,NAME]`: character, style, concept; fast, quality, low-vram. A
preset is laid over the files, and what it replaces in them is told; `--set` wins over it. To let your file
win, name the preset's before it (`trainer train train_configs/presets/style.yaml my.yaml`). The files in
`train_configs/hardware` are for people who look for one: the machine is seen without.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for topic, rows in elsewhere.keys().items():
        parts.append(f"\n## {topic}\n\n{_rows('there', rows)}")
    parts.append(f"\n## Files\n\n{_rows('a file called', elsewhere.files())}")
    parts.append(f"\n## Environment variables\n\n{_variables()}")
    return "".join(parts)


def _rows(head: str, rows: tuple[Row, ...]) -> str:
    cells = ((", ".join(f"`{name}`" for name in row.names), _ours(row), row.note) for row in rows)
    return markdown((head, "here", "what to know"), cells)


def _ours(row: Row) -> str:
    return f"`{row.ours}`" if row.ours else "none"


def _variables() -> str:
    cells = (
        (_names(row), "an error" if row.is_error else "a warning", row.says, row.remedy)
        for row in elsewhere.foreign()
    )
    return markdown(("variable", "is", "because", "what to do"), cells)


def _names(row: Foreign) -> str:
    """Patterns as people write them, with the value where it matters."""
    value = {r"\s*all\s*": "=all", r".*backend\s*:\s*native.*": "=backend:native", "(?!0$).+": "=1"}.get(
        row.value, ""
    )
    names = [name.replace(".*", "*") for name in row.names]
    return ", ".join(f"`{name}{value}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
