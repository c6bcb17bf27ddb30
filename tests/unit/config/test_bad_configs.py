"""Mistakes that users make: each ends with exit code 78, its place and a remedy, never with a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.config.reading.validate import validate
from trainer.config.tree import from_plain, merge

GOOD = """\
family: flux1_dev
model:
  pretrained_model_name_or_path: base
data:
  sets:
    - img_dir: images
output_dir: out
"""
"""Seven lines: what a case adds starts in line 8."""


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One bad configuration, and (place, what, remedy) of each problem that must be reported."""

    text: str | bytes = GOOD
    arguments: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[tuple[str, str, str], ...]


def added(text: str, *problems: tuple[str, str, str]) -> Bad:
    return Bad(text=GOOD + text, problems=problems)


def changed(old: str, new: str, *problems: tuple[str, str, str]) -> Bad:
    assert old in GOOD
    return Bad(text=GOOD.replace(old, new), problems=problems)


def given(*arguments: str, problem: tuple[str, str, str]) -> Bad:
    return Bad(arguments=arguments, problems=(problem,))


def variable(name: str, value: str, what: str, remedy: str) -> Bad:
    return Bad(environ={name: value}, problems=((name, what, remedy),))


FILES: dict[str, Bad] = {
    "TOML": Bad(
        text=GOOD,
        arguments=("c.toml",),
        problems=(("c.toml", "this is TOML, a configuration is YAML", "train_configs/"),),
    ),
    "empty file": Bad(text="", problems=(("c.yaml", "holds no settings", "train_configs/"),)),
    "comments only": Bad(text="# nothing\n", problems=(("c.yaml", "holds no settings", "train_configs/"),)),
    "a list": Bad(text="- a\n- b\n", problems=(("c.yaml:1", "got a list", "train_configs/"),)),
    "a sentence": Bad(text="hello there\n", problems=(("c.yaml:1", 'got "hello there"', "train_configs/"),)),
    "repeated key": added(
        "train:\n  seed: 1\n  seed: 2\n",
        ("c.yaml:10", "`seed` is written twice; the first is in line 9", "keep one"),
    ),
    "repeated section": added(
        "data:\n  resolution: 512\n",
        ("c.yaml:8", "`data` is written twice; the first is in line 4", "keep one"),
    ),
    "tab": added("train:\n\tseed: 1\n", ("c.yaml:9", "a tab", "use spaces")),
    "indentation": added(
        "train:\n  seed: 1\n log_every_steps: 2\n", ("c.yaml:10", "not valid YAML", "indentation")
    ),
    "colon in a prompt": added(
        "validation:\n  prompts:\n    - style: oil: a cat\n",
        ("c.yaml:10", "a `:` where none", "quote a text"),
    ),
    "colon in a prompt of one more": added(
        "validation:\n  prompts:\n    - a cat: sitting\n",
        (
            "c.yaml:10",
            "`validation.prompts.0`: expected a text that is not empty, got a mapping",
            'quote a text that holds `: `, as in "a cat: sitting"',
        ),
    ),
    "colon in a trigger word": changed(
        "  sets:",
        "  trigger_word:\n    a cat: sitting\n  sets:",
        ("c.yaml:5", "`data.trigger_word`: expected a text", "quote a text that holds `: `"),
    ),
    "prompt in brackets": added(
        "validation:\n  prompts:\n    - [V] a cat\n", ("c.yaml:10", "not valid YAML", "quote texts")
    ),
    "quote not closed": added(
        'validation:\n  prompts: ["a cat, a dog]\n  seed: 1\n',
        ("c.yaml:9", "never closed", "close the quote"),
    ),
    "anchor": added("lora: &a\n  rank: 8\n", ("c.yaml:8", "anchors", "a file of their own")),
    "merge key": added("lora:\n  <<: {rank: 8}\n", ("c.yaml:9", "merge keys", "several files")),
    "tag": added("lora:\n  rank: !!python/name:os.sep x\n", ("c.yaml:9", "tag", "quote a text")),
    "two documents": added("---\nmethod: lora\n", ("c.yaml:8", "second document", "one file for each")),
    "deep brackets": added(f"lora: {'[' * 5000}\n", ("c.yaml:8", "nested more than", "check brackets")),
    "Latin-1": Bad(
        text=GOOD.encode() + "# caf\u00e9\n".encode("latin-1"),
        problems=(("c.yaml:8", "byte 0xe9 is not UTF-8", "save the file as UTF-8"),),
    ),
    "UTF-16": Bad(
        text=GOOD.encode("utf-16"), problems=(("c.yaml:1", "is not UTF-8", "save the file as UTF-8"),)
    ),
    "control character": added("# a\x07\n", ("c.yaml:8", "control character U+0007", "remove it")),
    "weights instead of a config": Bad(
        text=b"\0" * (1 << 21), problems=(("c.yaml", "too large for a configuration", "train_configs/"),)
    ),
}

KEYS: dict[str, Bad] = {
    "misspelt key": added(
        "train:\n  learning_rte: 1e-4\n",
        ("c.yaml:9", "unknown key `train.learning_rte`", "did you mean `learning_rate`?"),
    ),
    "key in the wrong section": added(
        "lora:\n  learning_rate: 1e-4\n",
        ("c.yaml:9", "unknown key `lora.learning_rate`", "did you mean `train.learning_rate`?"),
    ),
    "another trainer's key": added(
        "train:\n  gradient_checkpointing: true\n",
        ("c.yaml:9", "unknown key", "did you mean `features.activation_checkpointing`?"),
    ),
    "another trainer's key without one of ours": added(
        "train_text_encoder: true\n",
        ("c.yaml:8", "unknown key `train_text_encoder`", "there is none here, leave it out: text encoders"),
    ),
    "another trainer's section": added(
        "network:\n  linear: 8\n  linear_alpha: 8\n",
        ("c.yaml:8", "unknown key `network`", "it is a section: `lora:`"),
        ("c.yaml:9", "unknown key `network.linear`", "did you mean `lora.rank`?"),
        ("c.yaml:10", "unknown key `network.linear_alpha`", "did you mean `lora.alpha`?"),
    ),
    "misspelt section with another trainer's keys": added(
        "optimiser:\n  lr: 1e-4\n  name: adamw\n",
        ("c.yaml:8", "unknown key `optimiser`", "did you mean `train.optimizer`? Below it, `lr`:"),
    ),
    "unified memory": added(
        "features:\n  unified_memory: true\n",
        ("c.yaml:9", "unknown key `features.unified_memory`", "UNIFIED_MEMORY=true in the environment"),
    ),
    "secret in a file": added(
        "hf_token: x\n", ("c.yaml:8", "unknown key `hf_token`", "HF_TOKEN_PATH names, never into")
    ),
    "key in capitals": added("train:\n  Seed: 1\n", ("c.yaml:9", "unknown key `train.Seed`", "write `seed`")),
    "dotted key": added("train.seed: 1\n", ("c.yaml:8", "unknown key `train.seed`", "nest it")),
    "key of no section in one": added(
        "lora:\n  output_dir: x\n", ("c.yaml:9", "unknown key `lora.output_dir`", "outside of all sections")
    ),
    "misspelt section": added(
        "trian:\n  seed: 1\n", ("c.yaml:8", "unknown key `trian`", "did you mean `train`?")
    ),
    "alpaca's key for a part of a record": added(
        "validation:\n  chat_file: a.jsonl\n  columns: {prompt: q, output: a}\n",
        ("c.yaml:10", "unknown key `validation.columns.output`", "did you mean `response`?"),
    ),
    "key of no part of a record": added(
        "validation:\n  chat_file: a.jsonl\n  columns: {prompt: q, response: a, rank: a}\n",
        ("c.yaml:10", "unknown key `validation.columns.rank`", "known here: messages, prompt, query"),
    ),
    "one underscore for a dot": added(
        "train_seed: 3\n", ("c.yaml:8", "unknown key `train_seed`", "did you mean `train.seed`?")
    ),
    "key like nothing": added("lora:\n  xyzzy: 1\n", ("c.yaml:9", "unknown key", "known here: rank, alpha")),
    "key of a set beside the sets": changed(
        "  sets:", "  img_dir: images\n  sets:", ("c.yaml:5", "unknown key `data.img_dir`", "`data.sets`?")
    ),
    "nothing but regularisation": changed(
        "    - img_dir: images",
        "    - {img_dir: images, is_reg: true}",
        ("c.yaml:6", "every one of `data.sets` is a regularisation set", "leave is_reg out"),
    ),
    "views that do not go together": changed(
        "    - img_dir: images",
        "    - {img_dir: images, random_crop: 16}\n    - {img_dir: others, random_crop: 15}",
        (
            "c.yaml:6",
            "with 16, 15 views an image: with their shares kept an epoch is 240 times as long",
            "counts that divide one another",
        ),
    ),
    "key in a set": changed(
        "    - img_dir: images",
        "    - img_dirs: images",
        ("c.yaml:6", "unknown key `data.sets.0.img_dirs`", "did you mean `img_dir`?"),
    ),
    "set of nothing": changed(
        "    - img_dir: images",
        "    - repeats: 2",
        ("c.yaml:6", "`data.sets.0.img_dir` is missing", "add `img_dir"),
    ),
    "set of two kinds": changed(
        "    - img_dir: images",
        "    - img_dir: images\n      chat_file: chats.jsonl",
        ("c.yaml:7", "`data.sets.0` has both `img_dir` and `chat_file`", "make it two sets"),
    ),
    "set of a file and a list": changed(
        "    - img_dir: images",
        "    - chat_file: a.jsonl\n      dataset_info: dataset_info.json\n      name: x",
        ("c.yaml:7", "`data.sets.0` has both `chat_file` and `dataset_info`", "make it two sets"),
    ),
    "list of sets without a name": changed(
        "    - img_dir: images",
        "    - dataset_info: dataset_info.json",
        ("c.yaml:6", "`data.sets.0.dataset_info` has no effect without `name`", "add `name: NAME`"),
    ),
    "name without a list of sets": changed(
        "    - img_dir: images",
        "    - chat_file: a.jsonl\n      name: x",
        ("c.yaml:7", "`data.sets.0.name` has no effect without `dataset_info`", "add `dataset_info: FILE`"),
    ),
    "the same name twice": changed(
        "    - img_dir: images",
        "    - {dataset_info: d.json, name: x}\n    - {dataset_info: d.json, name: y}\n"
        "    - {dataset_info: d.json, name: x}",
        ("c.yaml:8", "`data.sets.2.dataset_info`: d.json/x is a set already (c.yaml:6)", "repeats: 2"),
    ),
    "columns of images": changed(
        "    - img_dir: images",
        "    - img_dir: images\n      columns: {messages: chat}",
        ("c.yaml:7", "`data.sets.0.columns` has no effect without `chat_file`", "remove it"),
    ),
    "columns of a list of sets": changed(
        "    - img_dir: images",
        "    - dataset_info: d.json\n      name: x\n      columns: {messages: chat}",
        ("c.yaml:8", "`data.sets.0.columns` has no effect without `chat_file`", "columns of its own"),
    ),
    "columns of two formats": changed(
        "    - img_dir: images",
        "    - chat_file: a.jsonl\n      columns: {messages: chat, response: answer}",
        ("c.yaml:7", "`data.sets.0.columns` names messages and response", "remove one of them"),
    ),
    "columns without an answer": changed(
        "    - img_dir: images",
        "    - chat_file: a.jsonl\n      columns: {prompt: question}",
        ("c.yaml:7", "`data.sets.0.columns` does not say where", "name messages, or prompt and response"),
    ),
    "unknown column": changed(
        "    - img_dir: images",
        "    - chat_file: a.jsonl\n      columns: {mesages: chat}",
        ("c.yaml:7", "unknown key `data.sets.0.columns.mesages`", "did you mean `messages`?"),
    ),
    "no family": changed(
        "family: flux1_dev", "method: lora", ("c.yaml", "`family` is missing", "trainer families")
    ),
    "unknown family": changed(
        "flux1_dev", "FLUX.1-dew", ("c.yaml:1", 'unknown family "FLUX.1-dew"', "did you mean `flux1_dev`?")
    ),
    "family without a name": changed(
        "family: flux1_dev", 'family: " "', ("c.yaml:1", "`family`: expected a text", "trainer families")
    ),
    "no data": Bad(
        text="family: flux1_dev\noutput_dir: out\n",
        problems=(("c.yaml", "`data.sets` is missing", "pass --dataset DIR"),),
    ),
    "no output": changed("output_dir: out\n", "", ("c.yaml", "`output_dir` is missing", "pass --output DIR")),
}

VALUES: dict[str, Bad] = {
    "repeats beyond memory": changed(
        "    - img_dir: images",
        "    - img_dir: images\n      repeats: 1000000000",
        ("c.yaml:7", "at least 1 and at most 10000", "leave it out for 1"),
    ),
    "mode that leaves 0 to 1": added(
        "flow:\n  weighting_scheme: mode\n  mode_scale: 8\n",
        ("c.yaml:10", "`flow.mode_scale` is 8.0: noise levels would leave 0 to 1", "-1 and at most 1.75"),
    ),
    "mode that is out of bounds and not used": added(
        "flow:\n  mode_scale: 2\n",
        ("c.yaml:9", "`flow.mode_scale` has no effect without `flow.weighting_scheme: mode`", "remove it"),
    ),
    "guidance beyond floats": added(
        "validation:\n  guidance_scale: 1e300\n",
        ("c.yaml:9", 'a number of at least 0 and at most 1000, got "1e300"', "leave it out for 3.5"),
    ),
    "text for a number": added(
        "train:\n  max_train_steps: many\n",
        ("c.yaml:9", 'expected a whole number of at least 1, got "many"', "leave it out for 1500"),
    ),
    "switch for a number": added(
        "train:\n  seed: true\n",
        ("c.yaml:9", 'whole number of at least 0 and below 4294967296, got "true"', "0"),
    ),
    "a batch beyond all memory": added(
        "train:\n  train_batch_size: 1000000\n", ("c.yaml:9", "at most 4096", "leave it out for 1")
    ),
    "fraction of a step": added("train:\n  max_train_steps: 1.5\n", ("c.yaml:9", 'got "1.5"', "1500")),
    "no value": added("train:\n  learning_rate:\n", ("c.yaml:9", "got nothing", "write for example 1e-4")),
    "comma in a number": added("train:\n  learning_rate: 0,0001\n", ("c.yaml:9", 'got "0,0001"', "1e-4")),
    "not a number": added(
        "train:\n  weight_decay: nan\n", ("c.yaml:9", 'got "nan"', "leave it out for auto")
    ),
    "share above one": changed(
        "  sets:", "  caption_dropout_rate: 5\n  sets:", ("c.yaml:5", "at most 1.0, got", "0.05 means 5 %")
    ),
    "half precision": changed(
        "base",
        "base\n  dtype: float16",
        ("c.yaml:4", "expected auto, bf16, fp16 or fp32", "write bf16, fp16 or fp32"),
    ),
    "word not among the choices": added(
        "features:\n  attention: flsh\n", ("c.yaml:9", 'got "flsh"', "did you mean `flash`?")
    ),
    "switch that is none": added(
        "features:\n  tf32: maybe\n", ("c.yaml:9", "expected auto, true or false", "leave it out for auto")
    ),
    "text for a section": added(
        "train: fast\n", ("c.yaml:8", "`train`: expected keys (max_train_steps", "indent the keys")
    ),
    "text for a list": added("validation:\n  prompts: a cat\n", ("c.yaml:9", "expected a list", "[a, b]")),
    "empty prompt": added(
        'validation:\n  prompts:\n    - a cat\n    - ""\n',
        ("c.yaml:11", "`validation.prompts.1`: expected a text that is not empty", "correct it or remove it"),
    ),
    "two empty prompts": added(
        'validation:\n  prompts: ["", ""]\n',
        ("c.yaml:9", "`validation.prompts.0`: expected a text that is not empty", "correct it or remove it"),
        ("c.yaml:9", "`validation.prompts.1`: expected a text that is not empty", "correct it or remove it"),
    ),
    "three bad metrics": added(
        "validation:\n  metrics: [clip, dino, fid]\n",
        ("c.yaml:9", "`validation.metrics.0`: expected", "did you mean"),
        ("c.yaml:9", "`validation.metrics.1`: expected", "did you mean"),
    ),
    "empty trigger word": changed(
        "  sets:",
        '  trigger_word: " "\n  sets:',
        ("c.yaml:5", "expected a text that is not empty", "leave it out"),
    ),
    "no target": added("lora:\n  target_modules: []\n", ("c.yaml:9", "got an empty list", "[a, b]")),
    "no sets": changed(
        "sets:\n    - img_dir: images", "sets: []", ("c.yaml:5", "got an empty list", "--dataset DIR")
    ),
    "one folder for sets": changed(
        "sets:\n    - img_dir: images",
        "sets: images",
        ("c.yaml:5", 'expected a list with at least one item, got "images"', "[{img_dir: DIR}]"),
    ),
    "empty path": changed(
        "output_dir: out", 'output_dir: ""', ("c.yaml:7", 'expected a path, got ""', "--output DIR")
    ),
    "home of nobody": changed(
        "output_dir: out",
        "output_dir: ~no-such-user/x",
        ("c.yaml:7", '"~no-such-user/x": there is no such user', "--output DIR"),
    ),
    "variable in a path": changed(
        "output_dir: out",
        "output_dir: ${OUT}/x",
        (
            "c.yaml:7",
            '`output_dir`: expected a path, got "${OUT}/x": variables are not read here',
            "write the path itself, or set TRAINER__OUTPUT_DIR to it, or pass --output DIR",
        ),
    ),
    "variable in a path of a set": changed(
        "img_dir: images", "img_dir: /data/$USER/a", ("c.yaml:6", "variables are not read", "path itself")
    ),
    "number of a layer": added(
        "lora:\n  rank_pattern:\n    to_k: 8\n    to_q: x\n",
        (
            "c.yaml:11",
            '`lora.rank_pattern.to_q`: expected a whole number of at least 1 and at most 1024, got "x"',
            "correct it or remove it",
        ),
    ),
    "layer in parts": added(
        "lora:\n  alpha_pattern:\n    blocks: {0: {to_q: 8}}\n",
        (
            "c.yaml:10",
            "`lora.alpha_pattern.blocks`: expected a number above 0, got a mapping",
            "write the name of a layer as one key: {blocks.0.to_q: 8}",
        ),
    ),
    "layer without a name": added(
        'lora:\n  rank_pattern: {" ": 8}\n', ("c.yaml:9", "`lora.rank_pattern`: expected a mapping", "leave")
    ),
}

MEANING: dict[str, Bad] = {
    "int8 and full": added(
        "method: full\nfeatures: {weights: int8}\n",
        ("c.yaml:9", "`features.weights: int8` cannot be trained", "`method: lora`"),
    ),
    "weights against dtype": changed(
        "base\n",
        "base\n  dtype: fp32\nfeatures: {weights: bf16}\n",
        ("c.yaml:5", "contradicts `model.dtype: fp32` (c.yaml:4)", "write the same in both"),
    ),
    "LoRA settings for full": added(
        "method: full\nlora:\n  rank: 8\n  alpha: 8\n",
        ("c.yaml:10", "`lora.rank` has no effect with `method: full`", "remove it"),
        ("c.yaml:11", "`lora.alpha` has no effect", "remove it"),
    ),
    "setting of another scheme": added(
        "flow:\n  logit_mean: 0.5\n",
        ("c.yaml:9", "no effect without `flow.weighting_scheme: logit_normal`", "remove it"),
    ),
    "warm-up longer than the run": added(
        "train:\n  max_train_steps: 100\n  lr_warmup_steps: 100\n",
        ("c.yaml:10", "`train.max_train_steps` is 100 (c.yaml:9)", "longer than its warm-up"),
    ),
    "trigger word in dropped captions": changed(
        "  sets:",
        "  caption_dropout_rate: 1\n  trigger_word: sks\n  sets:",
        (
            "c.yaml:6",
            "`data.trigger_word` is never seen: `data.caption_dropout_rate` is 1 (c.yaml:5)",
            "0.01 means 1 %",
        ),
    ),
    "unknown preset": added(
        "lora:\n  target_modules: atention\n",
        ("c.yaml:9", '"atention" is no preset of flux1_dev', "did you mean `attention`?"),
    ),
    "address of a model": changed(
        "_path: base",
        "_path: https://huggingface.co/org/name",
        ("c.yaml:3", "is an address", "write the repository id `org/name`"),
    ),
    "single file as a model": changed(
        "_path: base",
        "_path: flux1-dev.safetensors",
        ("c.yaml:3", "is a single file", "a language model's config.json"),
    ),
    "revision of a folder": changed(
        "_path: base", "_path: images\n  revision: main", ("c.yaml:4", "no effect on a folder", "remove it")
    ),
    "one folder twice": changed(
        "    - img_dir: images",
        "    - img_dir: images\n    - img_dir: ./images/../images",
        ("c.yaml:7", "is a set already (c.yaml:6)", "`repeats: 2`"),
    ),
    "one file with two layouts": changed(
        "    - img_dir: images",
        "    - {chat_file: a.jsonl, columns: {prompt: en, response: fr}}\n"
        "    - {chat_file: a.jsonl, columns: {prompt: fr, response: en}}",
        ("c.yaml:7", "is a set already (c.yaml:6)", "a copy of the file"),
    ),
    "held out two ways": added(
        "validation:\n  held_out: 2\n  img_dir: others\n",
        ("c.yaml:10", "`validation.held_out: 2` (c.yaml:9) both say what is held out", "choose one"),
    ),
    "held-out folder is trained on": added(
        "validation:\n  img_dir: ./images\n",
        ("c.yaml:9", "images is a training set (c.yaml:6)", "other images"),
    ),
    "output among the held-out images": added(
        "validation:\n  img_dir: .\n",
        ("c.yaml:7", "`output_dir` out lies in the image folder .", "outside it"),
    ),
    "output among the images": changed(
        "output_dir: out",
        "output_dir: images/out",
        ("c.yaml:7", "lies in the image folder images", "outside it"),
    ),
    "output is the images": changed(
        "output_dir: out", "output_dir: images", ("c.yaml:7", "lies in the image folder images", "outside it")
    ),
    "cache among the images": changed(
        "  sets:",
        "  cache_dir: images/cache\n  sets:",
        ("c.yaml:5", "the cache images/cache lies", "outside it"),
    ),
    "output is a file": changed(
        "output_dir: out", "output_dir: c.yaml", ("c.yaml:7", "is a file", "write a folder")
    ),
    "output with a name that is too long": changed(
        "output_dir: out",
        f"output_dir: {'x' * 300}",
        ("c.yaml:7", "`output_dir` has a name of 300 bytes", "shorter name"),
    ),
    "output whose files would have names that are too long": changed(
        "output_dir: out",
        f"output_dir: runs/{'é' * 100}",
        ("c.yaml:7", "`output_dir` has a name of 200 bytes, and 191 are possible", "shorter name"),
    ),
    "output with a path that is too long": changed(
        "output_dir: out",
        f"output_dir: /{'x' * 100 + '/' + 'y/' * 1900}",
        ("c.yaml:7", "`output_dir` is a path of 3901 bytes, and 3839 are possible", "shorter path"),
    ),
    "cache with a name that is too long": changed(
        "  sets:",
        f"  cache_dir: {'x' * 256}/y\n  sets:",
        ("c.yaml:5", "`data.cache_dir` has a name of 256 bytes, and 255 are possible", "shorter name"),
    ),
    "base model with a name that is too long": changed(
        "name_or_path: base",
        f"name_or_path: {'x' * 300}",
        ("c.yaml:3", "`model.pretrained_model_name_or_path` has a name of 300 bytes", "shorter name"),
    ),
    "more mistakes than anybody makes": Bad(
        text=GOOD + "".join(f"k{number}: 1\n" for number in range(5000)),
        problems=(
            *(
                (f"c.yaml:{8 + number}", f"unknown key `k{number}`", "known here: family")
                for number in range(100)
            ),
            ("c.yaml:108", "... and 4900 more mistakes", "correct those above"),
        ),
    ),
    "resume from a word": added(
        "checkpoint:\n  resume_from_checkpoint: latest\n",
        ("c.yaml:9", "neither auto, never nor a folder", "did you mean `auto`?"),
    ),
}

OUTSIDE: dict[str, Bad] = {
    "no such file": given("missing.yaml", problem=("missing.yaml", "no such file", "check the path")),
    "a file of a like name": given("cc.yaml", problem=("cc.yaml", "no such file", "did you mean `c.yaml`?")),
    "another trainer's file": given(
        "train_dgx_spark.yaml",
        problem=("train_dgx_spark.yaml", "no such file", "`train_configs/hardware/dgx-spark.yaml`?"),
    ),
    "unknown --preset": given(
        "--preset", "stile", problem=("--preset stile", 'unknown preset "stile"', "did you mean `style`?")
    ),
    "two presets, one misspelt": given(
        "--preset",
        "fast,stile",
        problem=("--preset stile", 'unknown preset "stile"', "did you mean `style`?"),
    ),
    "another trainer's key to set": given(
        "--set",
        "train.unet_lr=1e-4",
        problem=("--set train.unet_lr", "unknown key `train.unet_lr`", "did you mean `train.learning_rate`?"),
    ),
    "all GPUs": variable("CUDA_VISIBLE_DEVICES", "all", "`all` means no GPU at all", "unset it for all GPUs"),
    "another trainer's key in a variable": variable(
        "TRAINER__FEATURES__FP8_BACKEND",
        "te",
        "unknown key `features.fp8_backend`",
        "did you mean `features.compute`?",
    ),
    "a folder": given("images", problem=("images", "this is a directory", "name a YAML file")),
    "no equals sign": given(
        "--set", "train.seed", problem=("--set train.seed", "expected KEY=VALUE", "--set train.seed=1")
    ),
    "unknown key to set": given(
        "--set", "train.sed=1", problem=("--set train.sed", "unknown key `train.sed`", "did you mean `seed`?")
    ),
    "bad value to set": given(
        "--set", "train.seed=-1", problem=("--set train.seed", 'got "-1"', "leave it out for 0")
    ),
    "bad value over that of a file": Bad(
        text=GOOD + "lora:\n  rank: 24\n",
        arguments=("--set", "lora.rank=0"),
        problems=(("--set lora.rank", 'got "0"', "leave it out for 24"),),
    ),
    "bad value over that of a family": given(
        "--set",
        "validation.guidance_scale=-1",
        problem=("--set validation.guidance_scale", 'got "-1"', "leave it out for 3.5"),
    ),
    "item of a list": given(
        "--set",
        "data.sets.0.repeats=2",
        problem=("--set data.sets.0.repeats", "a single item of a list", "'data.sets=[...]'"),
    ),
    "quotes in a value to set": given(
        "--set",
        "train.optimizer='adamw'",
        problem=("--set train.optimizer", "the quotes around it would be part", "leave the quotes out"),
    ),
    "dots in the name of a layer": given(
        "--set",
        "lora.rank_pattern.blocks.0.to_q=8",
        problem=(
            "--set lora.rank_pattern.blocks.0.to_q",
            "`lora.rank_pattern.blocks`: expected a whole number",
            "--set 'lora.rank_pattern={blocks.0.to_q: 8}'",
        ),
    ),
    "bracket not closed": given(
        "--set",
        "validation.prompts=[a, b",
        problem=("--set validation.prompts", "never closed", "close the quote or bracket"),
    ),
    "output among --dataset": given(
        "--dataset", "x", "--output", "x/y", problem=("--output", "lies in the image folder x", "outside it")
    ),
    "unknown key in a variable": variable(
        "TRAINER__TRIAN__SEED", "1", "unknown key `trian`", "did you mean `train`?"
    ),
    "quotes in a variable": variable(
        "TRAINER__OUTPUT_DIR", '"/out/x"', "the quotes around it would be part", "leave the quotes out"
    ),
    "one underscore for a dot in a variable": variable(
        "TRAINER__TRAIN_SEED", "3", "unknown key `train_seed`", "did you mean TRAINER__TRAIN__SEED?"
    ),
    "bad value in a variable": variable("TRAINER__LORA__RANK", "", "got nothing", "leave it out for 16"),
    "misspelt variable": variable(
        "TRAINER_CACHEDIR", "/x", "unknown variable", "did you mean TRAINER_CACHE_DIR?"
    ),
    "one underscore for two": variable(
        "TRAINER_TRAIN_SEED", "1", "unknown variable", "did you mean TRAINER__TRAIN__SEED?"
    ),
    "cache variable with a name that is too long": variable(
        "TRAINER_CACHE_DIR", f"/tmp/{'x' * 256}", "has a name of 256 bytes", "shorter name"
    ),
    "empty --output": given("--output", "", problem=("--output", 'expected a path, got ""', "not set")),
    "empty --dataset": given("--dataset=", problem=("--dataset", 'expected a path, got ""', "not set")),
    "cache variable among the images": variable(
        "TRAINER_CACHE_DIR", "images/.cache", "lies in the image folder images", "outside it"
    ),
}

CASES = {**FILES, **KEYS, **VALUES, **MEANING, **OUTSIDE}


def report(
    case: Bad, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Exit code of `trainer config check`, and its stderr by problem: the first is the title."""
    monkeypatch.chdir(folder)
    (folder / "images").mkdir()
    text = case.text.encode() if isinstance(case.text, str) else case.text
    (folder / "c.yaml").write_bytes(text)
    (folder / "c.toml").write_text("[network]\ndim = 8\n")
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    code = main(["config", "check", "c.yaml", *case.arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err.rstrip("\n").replace("\n    -> ", " -> ").split("\n")


def test_there_are_enough() -> None:
    assert len(CASES) == sum(map(len, (FILES, KEYS, VALUES, MEANING, OUTSIDE))) >= 60


def test_a_remedy_names_no_value_that_another_key_or_list_decides() -> None:
    """Without a length the other one holds; items of lists are replaced whole."""
    below = from_plain({"train": {"num_train_epochs": 2}, "data": {"sets": [{"repeats": 3}]}}, "low")
    bad = from_plain({"train": {"max_train_steps": -5}, "data": {"sets": [{"repeats": -3}]}}, "high")
    _, _, problems = validate(merge(below, bad), [below, bad])
    told = {one.what.split("`")[1]: one.remedy for one in problems}
    assert {told["train.max_train_steps"], told["data.sets.0.repeats"]} == {"correct it, or leave it out"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_place_and_remedy(
    case: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (title, *lines) = report(case, tmp_path, monkeypatch, capsys)
    assert code == 78
    assert title.startswith("error: bad configuration") and "exit code 78" in title
    assert len(lines) == len(case.problems), "\n".join(lines)
    for line, (place, what, remedy) in zip(lines, case.problems, strict=True):
        written, _, hint = line.partition(" -> ")
        assert written.startswith(f"{place}: "), line
        assert what in written, line
        assert remedy in hint, line


def test_all_mistakes_of_all_layers_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("flux1_dev", "flux9_dev") + "train:\n  sed: 1\n  lr_warmup_steps: 9999\n  seed: x\n"
    case = Bad(
        text=text, arguments=("--set", "lora.rnk=1"), environ={"TRAINER__LORA__RANK": "0"}, problems=()
    )
    code, (title, *lines) = report(case, tmp_path, monkeypatch, capsys)
    assert code == 78
    assert title == "error: bad configuration, 6 problems (exit code 78)"
    assert {line.split(": ")[0] for line in lines} == {
        "c.yaml:1",
        "c.yaml:9",
        "c.yaml:10",
        "c.yaml:11",
        "TRAINER__LORA__RANK",
        "--set lora.rnk",
    }


def test_a_bad_value_is_not_compared_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = added("train:\n  max_train_steps: 1O0\n  lr_warmup_steps: 2000\n")
    _, lines = report(case, tmp_path, monkeypatch, capsys)
    assert [line.split(": ")[0] for line in lines[1:]] == ["c.yaml:9"]
