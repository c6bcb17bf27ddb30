"""No file that a whole run leaves holds a secret, though its configuration and environment do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.runs import Case, Workshop
from trainer.config.secrets import HIDDEN

TOKEN, KEY = "hf_zyxwvutsrqponmlkjihg", "a-key-for-some-service"


def test_the_files_of_a_run(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("SOME_SERVICE_KEY", KEY)
    prompts = f'validation.prompts=["{TOKEN}", "{KEY}", "https://me:pass@example.org"]'
    settings = (prompts, f"data.trigger_word={KEY}", "train.max_train_steps=2")
    job = workshop.job(Case(family="flux1_dev", method="lora"), tmp_path, *settings)
    job.train()
    assert json.loads((job.folder / "plan.json").read_text())["decisions"]
    written = [
        path
        for folder in (job.folder, Path(job.spec.runtime_dir))
        for path in folder.rglob("*")
        if path.is_file()
    ]
    names = [one.name for one in written]
    assert {"config.resolved.yaml", "plan.json", "metrics.jsonl", "metrics.prom"} <= {*names}
    assert any(name.startswith("events.out.tfevents.") for name in names)  # pictures are in it
    assert (job.folder / "config.resolved.yaml").read_text().count(HIDDEN) == 4
    secrets = [secret.encode() for secret in (TOKEN, KEY, "me:pass")]
    assert not [path.name for path in written for secret in secrets if secret in path.read_bytes()]
    # pictures say their prompts, and LoRA files their trigger word
    for suffix in (".png", ".safetensors"):
        assert any(HIDDEN.encode() in path.read_bytes() for path in written if path.suffix == suffix)
