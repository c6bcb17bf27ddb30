"""Write docs/doctor.md anew from the doctor's table of rules, trainer/doctor/rules.yaml.

python -m scripts.render_doctor
"""

from __future__ import annotations

from pathlib import Path

from trainer.doctor import rules
from trainer.doctor.entries import KINDS
from trainer.doctor.rules import SEVERITIES, Rule, Wish
from trainer.words.tables import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
_HEAD = """# The doctor

Written by `make docs` from `trainer/doctor/rules.yaml`. `trainer doctor FILE...` reads files of other
trainers and says what is an error, wrong, slow or unused in them, with line, reason and source, and what the
same wish is called here. Nothing is run, started or downloaded, and no torch is imported.

    trainer doctor                                  # this environment, its packages and this machine
    trainer doctor ds_config.json sft.yaml run.sh   # files of one run, judged together
    trainer doctor . --names                        # a folder, with the names of its keys here
    trainer doctor sft.yaml --facts h100.json       # for another machine (`trainer probe --json`)

Files that are given together are judged together: a script says by which launcher a run starts and how many
processes it has, a `pip freeze` which versions. Kinds are told by content first, then by name; a file of no
kind that is known (pictures, tables and archives too) is named and left alone, but for tokens in keys of
YAML, JSON and TOML; a folder's are passed over. Rules about the machine are for this one, or for that of
`--facts`; a file that `trainer probe --json` wrote may stand among the others.
`--environment FILE` holds the variables of this trainer's own process. Values of keys that look like tokens,
keys or passwords are never shown.

The last line says if FP8 works here, by what `trainer probe CONFIG` recorded; where nothing was recorded it
names that command. [fp8.md](fp8.md) has what runs in FP8, [coming-from.md](coming-from.md) the keys of
others.

## Exit codes

"""
_CODES = (
    ("0", "nothing is an error; with `--strict` nothing but notes was found"),
    ("69", "this machine cannot do what the files ask (rules marked *machine*), or no run can start on it"),
    ("78", "an error in a file, or a file that cannot be read"),
)
_DOCUMENT = """
## The FP8 document

"The FP8 document" is CONFIGURATION_ANALYSIS.md of github.com/sbhavani/llamafactory-fp8-hopper, which explains
by seven errors why FP8 took twice the time of bf16. Two of them are right, one is about several GPUs only,
one is a cost, two are wrong, and the last asks who decides.

"""
_SEVEN = (
    ("1 an `fp8` section in DeepSpeed's file", "right: nothing reads it", "`ds-fp8-section`"),
    ("2 gradients summed in fp32", "a cost: accurate; without it ZeRO sums in bf16", "`ds-fp32-sums`"),
    ("3 messages in fp32", "on several GPUs only", "`ds-fp32-messages-several`, `ds-fp32-messages`"),
    (
        "4 `fp8_backend: auto`",
        "right that it is torchao, which is slow where nothing compiles it",
        "`lf-fp8-eager`, `lf-backend-auto`",
    ),
    (
        "5 CUDA_DEVICE_MAX_CONNECTIONS=1 is missing",
        "wrong: with ZeRO and FSDP it is slower *with* it",
        "`env-one-connection`",
    ),
    ("6 NVTE_FP8_ALLREDUCE=1 is missing", "wrong: there is no such variable", "`env-fp8-allreduce`"),
    ("7 six places to write a wish in", "who decides: the tables below", ""),
)
_AFTER = """
Its corrected files keep bf16 and fp16 off in DeepSpeed's file, which is training in fp32 (`ds-no-precision`),
and its corrected script ends in the middle of a command (`sh-continuation`).

## Who decides

The first place that has a choice decides, and of several files of one place each decides for its own run.
`auto` and switches that are off are no choice.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, markdown(("code", "when"), _CODES)]
    parts += ["\n## Severities\n\n", markdown(("severity", "means"), SEVERITIES.items())]
    parts += [_DOCUMENT, markdown(("its error", "judged", "rule"), _SEVEN), _AFTER]
    parts += (f"\n{_wish(wish)}" for wish in rules.wishes())
    parts.append(f"\n## Rules\n\n{len(rules.rules())} rules, by the kind of file that they look at first.\n")
    by_kinds: dict[tuple[str, ...], list[Rule]] = {}
    for rule in rules.rules():
        by_kinds.setdefault(rule.kinds, []).append(rule)
    for kinds, group in by_kinds.items():
        title = ", ".join(KINDS[kind] for kind in kinds)
        parts.append(f"\n### {title[0].upper()}{title[1:]}\n\n{_table(group)}")
    return "".join(parts)


def _wish(wish: Wish) -> str:
    """A wish with its places, the one that decides first."""
    rows = (
        (
            str(number),
            ", ".join(KINDS[kind] for kind in place.kinds),
            ", ".join(f"`{key.removeprefix('**.')}`" for key in place.test.keys),
            place.note,
        )
        for number, place in enumerate(wish.places, 1)
    )
    table = markdown(("", "kind of file", "keys", "what to know"), rows)
    title = f"### {wish.name[0].upper()}{wish.name[1:]}"
    return f"{title}\n\n{table}\nWhy: {wish.why}. Here: {wish.here}. Source: {wish.source}.\n"


def _table(group: list[Rule]) -> str:
    rows = (
        (
            f"`{rule.id}`",
            f"{rule.severity}{', *machine*' if rule.machine else ''}",
            f"{rule.what}: {rule.why}",
            rule.here,
            rule.source,
        )
        for rule in group
    )
    return markdown(("rule", "severity", "says", "here", "source"), rows)


if __name__ == "__main__":
    PAGE.write_text(page())
