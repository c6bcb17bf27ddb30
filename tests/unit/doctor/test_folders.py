"""Folders: what lies beside configurations, and what belongs to which run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doctor_cases import Side, asked
from trainer.doctor.reading import read

FP8 = "stage: sft\nfinetuning_type: lora\nfp8: true\nfp8_backend: te\n"
DATA = {
    "tokenizer.json": " " * (1 << 20) + "{}",
    "vocab.json": json.dumps({f"w{number}": number for number in range(20_001)}),
    "trainer_state.json": json.dumps(
        {"max_steps": 9, "save_steps": 3, "log_history": [{"loss": 1.0, "step": 1} for _ in range(9_000)]}
    ),
    "tsconfig.json": '{\n// comment\n"compilerOptions": {}}',
    "lines.json": '{"text": "a"}\n{"text": "b"}\n',
    "deployment.yaml": "{{- if .Values.on }}\napiVersion: v1\nkind: Pod\n{{- end }}\n",
}


def test_files_beside_configurations_that_cannot_be_read_are_none_of_the_doctors(tmp_path: Path) -> None:
    for name, text in {**DATA, "sft.yaml": "stage: sft\nfinetuning_type: lora\n"}.items():
        (tmp_path / name).write_text(text)
    result = read([tmp_path])
    assert [document.kind for document in result.documents] == ["llamafactory"]
    assert not result.problems
    for name in DATA:
        assert len(read([tmp_path / name]).problems) == 1, name
    (problem,) = read([tmp_path / "vocab.json"]).problems
    assert problem.what == "too large for a configuration (more than 20000 keys)"
    assert "JSON" not in problem.what + problem.remedy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds_config.json", '{\n// comment\n"zero_optimization": {}}'),
        ("short.json", '{"bf16": {"enabled": true},}'),
        ("dataset_info.json", '{"a": {"file_name": "a.json"},}'),
        ("my.yaml", "family: sdxl\ntrain: {\n"),
        ("data.json", '[{"instruction": "a"}, {"instruction": }]'),
    ],
)
def test_a_configuration_of_a_folder_that_cannot_be_read_is_a_problem(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    assert len(read([tmp_path]).problems) == 1


def test_files_of_several_runs_do_not_decide_over_each_other(tmp_path: Path) -> None:
    files = {"a.yaml": FP8, "b.yaml": FP8}
    assert not asked(Side(files=files), tmp_path).decided
    acc = "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
    (row,) = asked(Side(files={**files, "acc.yaml": acc}), tmp_path).decided
    assert row.wish == "FP8"
    assert row.winner == f"{tmp_path}/a.yaml:3 fp8: true or {tmp_path}/b.yaml:3 fp8: true"
    assert row.losers == (f"{tmp_path}/acc.yaml:2 mixed_precision: fp8 (only by accelerate launch)",)


@pytest.mark.parametrize("name", ["my (kto", "[kto", "*x", "set [a]", "c++", "kto.v1", "kto_v1"])
def test_a_set_of_any_name_is_found_in_the_list_of_sets(tmp_path: Path, name: str) -> None:
    info = json.dumps({name: {"file_name": "a.json", "columns": {"kto_tag": "label"}}})
    chosen = f"stage: sft\nfinetuning_type: lora\ndataset: '{name}'\n"
    report = asked(Side(files={"dataset_info.json": info, "sft.yaml": chosen}), tmp_path)
    assert [one.rule for one in report.findings] == ["lf-kto-other-stage"]
    other = asked(Side(files={"dataset_info.json": info, "sft.yaml": chosen.replace(name, "a")}), tmp_path)
    assert not other.findings


OWN = (
    ("gradient_clipping", "0.5", "--max_grad_norm 1"),
    ("train_micro_batch_size_per_gpu", "2", "--per_device_train_batch_size 1"),
    ("gradient_accumulation_steps", "2", "--gradient_accumulation_steps 1"),
    ("bf16", '{"enabled": false}', "--bf16 true"),
    ("optimizer", '{"params": {"lr": 3e-5}}', "--learning_rate 1e-4"),
)


@pytest.mark.parametrize(("key", "value", "words"), OWN, ids=[key for key, _, _ in OWN])
def test_a_program_with_deepspeeds_own_arguments_is_no_trainer_of_hf(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    files = {
        "ds.json": f'{{"zero_optimization": {{"stage": 2}}, "{key}": {value}}}',
        "run.sh": f"deepspeed --num_gpus 8 squad.py {words} --deepspeed --deepspeed_config ds.json\n",
    }
    assert not asked(Side(files=files), tmp_path).findings
    files["ds.json"] = files["ds.json"].replace(value, '"auto"').replace("bf16", "fp16")
    report = asked(Side(files=files), tmp_path)
    assert {one.rule for one in report.findings} == {"ds-auto-without-trainer"}


def test_a_deepspeed_file_is_compared_with_runs_that_name_it(tmp_path: Path) -> None:
    run = "stage: sft\nfinetuning_type: lora\ndeepspeed: conf/%s\nper_device_train_batch_size: %d\n"
    file = '{"train_micro_batch_size_per_gpu": %d}'
    files = {"z2.json": file % 4, "z3.json": file % 1, "b.yaml": run % ("z3.json", 1)}
    assert not asked(Side(files=files), tmp_path).findings
    files = {"z2.json": file % 1, "a.yaml": run % ("z2.json", 4), "b.yaml": run % ("z2.json", 1)}
    assert [one.rule for one in asked(Side(files=files), tmp_path).findings] == ["ds-batch-differs"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("gradient_clipping", 0.5, "ds-clipping"), ("gradient_accumulation_steps", 2, "ds-accumulation")],
)
def test_what_a_run_does_not_write_is_compared_by_its_default(
    tmp_path: Path, key: str, value: float, said: str
) -> None:
    files = {
        "ds.json": json.dumps({"zero_optimization": {"stage": 2}, key: value}),
        "sft.yaml": "stage: sft\nfinetuning_type: lora\ndeepspeed: ds.json\n",
    }
    report = asked(Side(files=files), tmp_path)
    assert [one.rule for one in report.findings] == [f"{said}-differs"]
    files["sft.yaml"] = "stage: sft\nfinetuning_type: lora\n"
    assert not asked(Side(files=files), tmp_path).findings


OF_HF = "train.py --deepspeed ds.json --bf16 true"
RUNS = {
    "hf.json": '{"output_dir": "out", "num_train_epochs": 3, "bf16": true, "deepspeed": "ds.json"}',
    "hf.yaml": "output_dir: out\nbf16: true\ndeepspeed: ds.json\n",
    "deepspeed.sh": f"deepspeed --num_gpus 8 {OF_HF}\n",
    "torchrun.sh": f"torchrun $NODES --nproc_per_node 8 {OF_HF} --learning_rate $RATE\n",
    "python.sh": "python train.py --output_dir=out --deepspeed=conf/ds.json\n",
}
OTHERS = {
    "variable.sh": f"torchrun --nproc_per_node 8 {OF_HF} $MORE\n",
    "array.sh": f'torchrun --nproc_per_node 8 {OF_HF} --do_train "${{ARGS[@]}}"\n',
    "extra.sh": f"torchrun --nproc_per_node 8 {OF_HF} --do_train $EXTRA\n",
    "file.sh": f"torchrun --nproc_per_node 8 train.py sft.yaml {OF_HF.removeprefix('train.py')}\n",
    "config.sh": f"torchrun --nproc_per_node 8 {OF_HF} --config settings\n",
    "own.sh": "deepspeed --num_gpus 8 squad.py --bf16 --deepspeed --deepspeed_config ds.json\n",
    "other.sh": "python fit.py --deepspeed ds.json --rate 1e-4\n",
}


def differing(folder: Path, files: dict[str, str], clipping: object = 0.5, steps: object = 8) -> list[str]:
    tree = {"bf16": {"enabled": True}, "gradient_clipping": clipping, "gradient_accumulation_steps": steps}
    report = asked(Side(files={"ds.json": json.dumps(tree), **files}), folder)
    assert not report.problems
    return [one.rule for one in report.findings if one.rule.endswith("-differs")]


@pytest.mark.parametrize("name", RUNS)
def test_what_hfs_trainer_is_not_told_is_compared_by_its_default(tmp_path: Path, name: str) -> None:
    files = {name: RUNS[name]}
    assert differing(tmp_path, files) == ["ds-clipping-differs", "ds-accumulation-differs"]
    assert not differing(tmp_path, files, 1.0, 1) and not differing(tmp_path, files, "auto", "auto")


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_that_go_on_elsewhere_or_are_no_trainers_have_no_default(tmp_path: Path, name: str) -> None:
    assert not differing(tmp_path, {name: OTHERS[name]})


def test_what_a_command_says_beside_its_file_is_no_default(tmp_path: Path) -> None:
    command = "torchrun sft.py --config hf.yaml --max_grad_norm 0.5 --gradient_accumulation_steps 8\n"
    assert not differing(tmp_path, {"hf.yaml": RUNS["hf.yaml"], "run.sh": command})


@pytest.mark.parametrize(
    "raw",
    [
        b"PAR1\x15\x04\x15\x80\xff PAR1",
        b"ARROW1\0\0\xff\xff\xff\xff",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x90",
        b'\x50\0\0\0\0\0\0\0{"a": {"dtype": "F32"}}' + b"\x80?" * 9,
        b"\x50" + b"\0" * (1 << 20) + b"a",
        b"\x1f\x8b\x08\x08\x80",
    ],
    ids=["parquet", "arrow", "picture", "weights", "large", "packed"],
)
@pytest.mark.parametrize("name", ["msg.parquet", "data"])
def test_named_files_of_data_are_left_alone(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "sft.yaml").write_text(FP8)
    result = read([tmp_path / name, tmp_path / "sft.yaml"])
    assert [one.kind for one in result.documents] == ["unknown", "llamafactory"] and not result.problems
    assert [one.kind for one in read([tmp_path]).documents] == ["llamafactory"]


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("freeze", "torch==2.1\n".encode("utf-16")),
        ("run", "#!/bin/sh\n# größer\n".encode("latin-1")),
        ("sft.yaml", b"PAR1\x15\x04\x15\x80"),
    ],
)
def test_a_text_of_another_coding_is_a_problem(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    (problem,) = read([tmp_path / name]).problems
    assert problem.remedy == "save the file as UTF-8"
