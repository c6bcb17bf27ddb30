"""Readers: every kind of file as keys with their lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from trainer.doctor import json_text, recognise, scripts, shell_words, yaml_text
from trainer.doctor.json_text import JsonError
from trainer.doctor.reading import Read, read


def found(tmp_path: Path, name: str, text: str) -> Read:
    (tmp_path / name).write_text(text)
    return read([tmp_path / name])


def lines(entries: object) -> dict[str, tuple[str, int]]:
    assert isinstance(entries, list | tuple)
    return {entry.dotted: (entry.value, entry.line) for entry in entries if not entry.section}


def test_json_keeps_lines_and_text() -> None:
    text = '{\n "a": {"b": 5e8,\n  "c.d": true}, "e": [1,\n "x\\ny"],\n "n": null}'
    assert lines(json_text.entries(text)) == {
        "a.b": ("5e8", 2),
        "a.c_d": ("true", 3),
        "e.0": ("1", 3),
        "e.1": ("x\ny", 4),
        "n": ("", 5),
    }


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('{"a": 1,\n}', 2, "a key in quotes"),
        ('{\n// no\n"a": 1}', 2, "a comment"),
        ('{"a": 1}\n{"b": 2}', 2, "more text"),
        ('{"a": tru}', 1, "no value"),
        ('{"a": "b', 1, "does not end"),
        ("[" * 100, 1, "nested"),
        ("", 1, "no value"),
    ],
)
def test_json_that_is_none(text: str, line: int, said: str) -> None:
    with pytest.raises(JsonError, match=said) as error:
        json_text.entries(text)
    assert error.value.line == line


def test_yaml_of_others_has_documents_anchors_merges_and_tags() -> None:
    text = "a: &x {k: 1}\nb:\n  <<: *x\n  l: !ours 2\nc: *x\n---\nd: ~\n"
    parts, problems = yaml_text.entries(text, "f")
    assert not problems and len(parts) == 2
    assert lines(parts[0])["b.k"][0] == "1" and lines(parts[0])["b.l"] == ("2", 4)
    assert lines(parts[1]) == {"d": ("", 7)}


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "[" * 2000])
def test_yaml_that_holds_itself_or_is_deep_is_a_problem(text: str) -> None:
    _, problems = yaml_text.entries(text, "f")
    assert problems and all(problem.remedy for problem in problems)


def test_aliases_that_multiply_are_a_problem() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    parts, problems = yaml_text.entries("\n".join(rows), "f")
    assert not parts and "more than" in problems[0].what


def test_a_key_beside_a_merge_wins_and_is_no_repeat(tmp_path: Path) -> None:
    text = "services:\n  a: &a {image: x, ipc: host}\n  b:\n    <<: [*a, *a]\n    image: y\n"
    (document,) = found(tmp_path, "c.yaml", text).documents
    entries = [entry for entry in document.entries if entry.path[:2] == ("services", "b")]
    assert [(entry.name, entry.value, entry.first_line) for entry in entries] == [
        ("b", "", 0), ("ipc", "host", 0), ("image", "y", 0)
    ]  # fmt: skip


def test_repeats_are_told_once_and_on_one_line(tmp_path: Path) -> None:
    text = '{"fp16": {"enabled": true},\n "fp16": {"enabled": false}, "steps": 1, "steps": 2, "bf16": {}}'
    (document,) = found(tmp_path, "c.json", text.replace("steps", "train_batch_size")).documents
    assert document.kind == "deepspeed"
    told = [(entry.dotted, entry.line, entry.first_line) for entry in document.entries if entry.first_line]
    assert told == [("fp16", 2, 1), ("train_batch_size", 2, 2)]


def test_a_folder_without_what_is_installed_and_hidden(tmp_path: Path) -> None:
    for name in ("a", ".git", "venv/lib", "x/node_modules"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "compose.yaml").write_text("services: {}\n")
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "a" / "notes.yaml").write_text("a: 1\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "a" / "compose.yaml")
    assert [document.place for document in read([tmp_path]).documents] == [str(tmp_path / "a/compose.yaml")]


def words(text: str) -> list[list[str]]:
    return [[word.text for word in command] for command in shell_words.read(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a \'b c\' "d\\"e" f\\ g', [["a", "b c", 'd"e', "f g"]]),
        ("a \\\n b # c\nd", [["a", "b"], ["d"]]),
        ("a && b || c; d | e &", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("a >log 2>&1 b < in", [["a", "b"]]),
        ("cat > f <<'EOF'\nx y\nEOF\nnext", [["cat"], ["next"]]),
        ('a="$(b c; d)" e ${f:-g h}', [["a=$(b c; d)", "e", "${f:-g h}"]]),
        ("a 'never closed", [["a", "never closed"]]),
        ("a{b,c} d#e", [["a{b,c}", "d#e"]]),
        (
            "N=$(nvidia-smi | awk -F'(' '{print $1}' | wc -l)\nb",
            [["N=$(nvidia-smi | awk -F'(' '{print $1}' | wc -l)"], ["b"]],
        ),
        ("N=$(sed 's/(.*//' f)\nb", [["N=$(sed 's/(.*//' f)"], ["b"]]),
        ('N="$(sed "s/)//" f)" b', [['N=$(sed "s/)//" f)', "b"]]),
        ("N=$(a \\( b)\nc", [["N=$(a \\( b)"], ["c"]]),
        ("${A:-it's} b\nc 'd'", [["${A:-it's}", "b"], ["c", "d"]]),
        ("a --b=`c -L | wc -l` d", [["a", "--b=`c -L | wc -l`", "d"]]),
        ("a `never closed", [["a", "`never closed"]]),
    ],
)
def test_shell_words(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


def test_lines_of_words_and_a_backslash_that_continues_nothing() -> None:
    shell = shell_words.read("a \\\n  'b\n' \\\n c \\  # no\n d\n")
    assert [(word.text, word.line) for word in shell.commands[0]] == [("a", 1), ("b\n", 2), ("c", 4)]
    assert shell.broken == (4,)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("a \\\n --b \\\n # --c \\\n --d\n", [(3, "--d", 4)]),
        ("a \\\n # one\n # two\n\n -d\n", [(2, "-d", 5)]),
        ("a --b # why \\\n --c\n", [(1, "--c", 2)]),
        ("a \\\n # last\nb\n", []),
        ("a --b # why\n", []),
        ("A=(a \\\n # one \\\n --b)\nc -d\n", []),
        ("a \\ # blanks\n --b\n", []),
        ('case "$1" in # \\\n  --a) b ;;\nesac\n', []),
    ],
)
def test_comments_that_end_a_command(text: str, cut: list[tuple[int, str, int]]) -> None:
    assert [(line, word.text, word.line) for line, word in shell_words.read(text).cut] == cut


CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a"])
def test_records_of_data(tmp_path: Path, name: str) -> None:
    text = f'{CHAT}}}\n\n{CHAT}, "label": true}}\n{CHAT}, "label": false, "label": true}}'
    (document,) = found(tmp_path, name, text).documents
    assert document.kind == "conversations"
    told = [(entry.dotted, entry.value, entry.line, entry.first_line) for entry in document.entries]
    assert told == [
        ("record", "", 1, 0),
        ("record.messages", "", 1, 0),
        ("record.messages.role", "user", 1, 0),
        ("record.messages.content", "a", 1, 0),
        ("record.label", "true", 3, 0),
        ("record.label", "true", 4, 4),
        ("form", "lines", 0, 0),
    ]


def test_data_of_any_size_is_read_by_its_first_records(tmp_path: Path) -> None:
    rows = [f'{CHAT}, "label": false}}'] * 20_000
    for name, text in (("a.jsonl", "\n".join(rows)), ("a.json", f"[{', '.join(rows)}]")):
        result = found(tmp_path, name, text)
        assert [document.kind for document in result.documents] == ["conversations"] and not result.problems


@pytest.mark.parametrize(
    ("text", "line"), [(f"{CHAT}}}\n{CHAT}\n", 3), (f"[{CHAT}}},\n 1]", 2), (f"[{CHAT}}}\n{CHAT}}}]", 2)]
)
def test_data_that_is_broken_is_a_problem(tmp_path: Path, text: str, line: int) -> None:
    (problem,) = found(tmp_path, "a.json", text).problems
    assert problem.what.startswith("not valid JSON: ") and problem.where.endswith(f":{line}")


@pytest.mark.parametrize(
    ("text", "launcher", "options"),
    [
        ("accelerate launch --num_processes 8 --multi_gpu x.py --lr 1", "accelerate", {"lr": "1"}),
        ("python -m torch.distributed.run --nproc_per_node=8 x.py --bf16", "torchrun", {"bf16": "true"}),
        ("CUDA_VISIBLE_DEVICES=0 nohup python3 x.py --fp8=true &", "python", {"fp8": "true"}),
        ("llamafactory-cli train sft.yaml --learning-rate 1", "llamafactory-cli", {"learning_rate": "1"}),
        ("if x; then deepspeed --num_gpus 8 x.py --a; fi", "deepspeed", {"a": "true"}),
        ("python -u x.py --lr 1", "python", {"lr": "1"}),
        ("python -u -m torch.distributed.run --nproc_per_node=8 x.py --bf16", "torchrun", {"bf16": "true"}),
        ("srun torchrun --nproc_per_node 8 x.py --a", "torchrun", {"a": "true"}),
        ("srun --gres=gpu:8 -n 1 torchrun --nproc_per_node 8 x.py --a", "torchrun", {"a": "true"}),
        ("numactl --cpunodebind=0 python x.py --a", "python", {"a": "true"}),
        ("nohup nice -n 5 python x.py --a", "python", {"a": "true"}),
        ("timeout 3600 env A=1 /opt/venv/bin/python x.py --a", "python", {"a": "true"}),
        ("uv run --with a python x.py --a", "python", {"a": "true"}),
        ("accelerate launch --num_processes 8 --use_cpu x.py --a", "accelerate", {"a": "true"}),
        ("accelerate launch --dynamo_use_fullgraph -m x --a", "accelerate", {"a": "true"}),
        ("accelerate launch --unknown_switch x.py --a", "accelerate", {"a": "true"}),
        ("deepspeed --num_gpus 8 --force_multi x.py --a", "deepspeed", {"a": "true"}),
        ("torchrun --nproc_per_node 8 --nnodes `wc -l < f | cat` x.py --a", "torchrun", {"a": "true"}),
    ],
)
def test_launchers(text: str, launcher: str, options: dict[str, str]) -> None:
    script, *training = scripts.script(text, "f")
    entries = lines(script.entries)
    assert entries["launcher.name"][0] == launcher
    assert entries.get("launcher.processes", ("8", 0))[0] == "8"
    assert {entry.name: entry.value for one in training for entry in one.entries} == options


@pytest.mark.parametrize("text", ["sudo pip install deepspeed", "uv pip install deepspeed", "nice -n 5"])
def test_what_launches_nothing(text: str) -> None:
    assert [one.kind for one in scripts.script(text, "f")] == ["script"]
    assert "launcher.name" not in lines(next(scripts.script(text, "f")).entries)


def test_dockerfiles() -> None:
    text = (
        "# first\nFROM a AS b\nENV A=1 \\\n    # between\n    B='2 3'\nENV C 4 5\n"
        "RUN <<EOF\npip install x\nEOF\nUSER root\n"
    )
    document = scripts.dockerfile(text, "f")
    entries = lines(document.entries)
    assert entries["env.A"] == ("1", 3) and entries["env.B"] == ("2 3", 5) and entries["env.C"] == ("4 5", 6)
    assert "pip install x" in entries["RUN"][0] and entries["last.USER"] == ("root", 10)


@pytest.mark.parametrize("name", ["$BASE", "${BASE}"])
def test_an_image_that_an_argument_names(name: str) -> None:
    text = f"ARG BASE=nvcr.io/nvidia/pytorch:24.05-py3\nFROM {name}-a AS b\nFROM $OTHER\n"
    images = [entry.value for entry in scripts.dockerfile(text, "f").entries if entry.name == "FROM"]
    assert images == ["nvcr.io/nvidia/pytorch:24.05-py3-a AS b", "$OTHER"]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("x.yaml", "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n", "accelerate"),
        ("x", '{"zero_optimization": {"stage": 2}}', "deepspeed"),
        ("x.yaml", "train_micro_batch_size_per_gpu: 1\n", "deepspeed"),
        ("x.yaml", "finetuning_type: lora\n", "llamafactory"),
        ("x.yaml", "base_model: a\nadapter: lora\ndatasets: []\n", "axolotl"),
        ("x.json", '{"output_dir": "a", "bf16": true}', "arguments"),
        ("x.yaml", "family: a\ndata: {}\n", "ours"),
        ("x.json", '{"a": {"file_name": "a.json"}, "b": {"hf_hub_url": "a/b", "columns": {}}}', "datasets"),
        ("x.json", '{"a": {"file_name": "a.json"}, "b": {}}', "unknown"),
        ("x.json", '[{"instruction": "a", "output": "b"}]', "conversations"),
        ("x.jsonl", '{"file_name": "a.png", "text": "b"}', "unknown"),
        ("x.yaml", "services: {a: {image: b}}\n", "compose"),
        ("x.yaml", "apiVersion: v1\nkind: Pod\n", "kubernetes"),
        ("Dockerfile.gpu", "FROM a\n", "dockerfile"),
        ("dataset.toml", "[general]\nshuffle_caption = false\n[[datasets]]\nresolution = 512\n", "unknown"),
        ("x", "# b\nARG a=1\nFROM a:$a\n", "dockerfile"),
        ("x", "#!/usr/bin/env bash\ntrue\n", "script"),
        ("x.txt", "a==1\nb @ file:///c\n-e d\n", "packages"),
        ("x.txt", "a==1 \\\n    --hash=sha256:0a \\\n    --hash=sha256:0b\nb==2\n", "packages"),
        (".env", "A=1\n# b\nC=2\n", "environment"),
        ("env.txt", "SSH_CONNECTION=1.2.3.4 50 5.6.7.8 22\nPYTHON=/usr/bin/python3\n", "environment"),
        ("x.txt", "CUDA_VISIBLE_DEVICES=0 accelerate launch x\n", "script"),
        ("x.yaml", "a: 1\n", "unknown"),
        ("x.md", "# words\n", "unknown"),
        ("x", "", "unknown"),
    ],
)
def test_kinds_are_told_apart(tmp_path: Path, name: str, text: str, kind: str) -> None:
    result = found(tmp_path, name, text)
    assert [document.kind for document in result.documents] == [kind] and not result.problems


def test_a_recorded_machine_is_one(tmp_path: Path) -> None:
    machine = Path(__file__).resolve().parents[2] / "golden" / "machines" / "h200.json"
    result = found(tmp_path, "m.json", machine.read_text())
    assert result.facts is not None and result.facts.gpu.capability == (9, 0)
    broken = found(
        tmp_path, "n.json", machine.read_text().replace('"architecture"', '"x": 1, "architecture"')
    )
    assert broken.problems and broken.facts is None
    assert recognise.is_facts(json_text.entries(machine.read_text()))


def test_a_file_is_read_once_however_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    found = read([tmp_path, Path("notes.yaml"), tmp_path / "notes.yaml"]).documents
    assert [(one.kind, one.place) for one in found] == [("unknown", str(tmp_path / "notes.yaml"))]


def test_what_lies_in_a_closed_folder_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's answer, which root does not get."""
    (tmp_path / "good.yaml").write_text("services: {}\n")
    (tmp_path / "closed").mkdir()
    stat = os.stat

    def refused(path: str | Path | int, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(path).parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    result = read([tmp_path / "closed/run.yaml", tmp_path])
    assert [document.kind for document in result.documents] == ["compose"]
    assert [(one.what, one.where) for one in result.problems] == [
        ("cannot be read: Permission denied", str(tmp_path / "closed/run.yaml"))
    ]


def test_files_that_cannot_be_read_are_problems_and_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"a" * (1 << 20) + b"aa")
    (tmp_path / "bytes.sh").write_bytes(b"export A=1\n\xff\n")
    (tmp_path / "bad.json").write_text('{\n"a": }')
    (tmp_path / "good.yaml").write_text("services: {}\n")
    files = [tmp_path / "large.yaml", tmp_path / "bad.json", tmp_path / "absent.yaml", Path("/dev/null")]
    result = read([tmp_path, *files])
    assert [document.kind for document in result.documents] == ["compose"]
    said = {Path(problem.where.partition(":")[0]).name: problem for problem in result.problems}
    assert sorted(said) == ["absent.yaml", "bad.json", "bytes.sh", "large.yaml", "null"]
    assert said["bytes.sh"].where.endswith(":2") and said["bad.json"].where.endswith(":2")
    assert all(problem.remedy for problem in result.problems)
    assert "DeepSpeed alone" in said["bad.json"].remedy
