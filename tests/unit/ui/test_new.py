"""A new run without HTTP: its plan is the command line's, and every refusal shows a way on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.data.pictures import write_pair
from tests.unit.ui import made
from trainer.cli import main
from trainer.config import environment
from trainer.data.sets.controls import control_folders
from trainer.errors import ConfigError, DataError, ExitCode
from trainer.planning.plan import MemoryRow
from trainer.queue.local import Local
from trainer.ui.studio import Studio, identifier
from trainer.ui.views import new, planned
from trainer.ui.views.asked import OWN, Asked, loaded_of
from trainer.ui.views.foreign import brought
from trainer.ui.views.new import NewRun, new_run

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ROOT / "tests/golden/machines"
RTX_4090 = (MACHINES / "rtx-4090.json").read_text()


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shipped files name paths from the repository's root; queue and machine are the test's."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "cpu.json"))
    planned._machine_at.cache_clear()


def asked(start: str = "flux1_dev_lora", facts: str = RTX_4090, **typed: str) -> Asked:
    keys = {key.replace("__", "."): text for key, text in typed.items()}
    return Asked(start=start, facts=facts, typed=keys)


def shown(view: NewRun, key: str) -> new.Shown:
    return next(one for one in view.fields if one.field.key == key)


CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "as it is shipped": ("flux1_dev_lora", "rtx-4090", {}),
    "written features": (
        "flux1_dev_lora",
        "h200",
        {"features__weights": "bf16", "train__train_batch_size": "4"},
    ),
    "full fine-tune": ("llama_full_bf16", "h200", {"train__max_train_steps": "700"}),
    "shared memory": ("qwen_image_lora", "dgx-spark", {"data__resolution": "768"}),
    "a CPU, with files": ("quickstart", "cpu", {"train__num_train_epochs": "3", "lora__rank": "4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_that_of_the_command_for_the_same_file(
    case: str, studio: Studio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, machine, typed = CASES[case]
    facts = MACHINES / f"{machine}.json"
    view = new_run(studio, asked(start, facts.read_text(), **typed))
    assert view.planned.plan is not None, view.planned.problems
    file = tmp_path / "run.yaml"
    file.write_text(view.yaml)
    assert main(["plan", str(file), "--facts", str(facts), "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    rows = [(row.feature, row.value, row.reason) for row in view.planned.rows]
    assert rows == [(row["feature"], row["value"], row["reason"]) for row in wanted["decisions"]]
    for mine, theirs in zip(view.planned.rows, wanted["decisions"], strict=True):
        by_somebody = theirs["source"].startswith(str(file))
        assert by_somebody or mine.source == theirs["source"]
    for bar, key in zip(view.planned.bars, ("train_memory", "cache_memory", "host_memory"), strict=False):
        assert [(one.name, one.bytes) for one in bar.segments] == [
            (row["name"], row["bytes"]) for row in wanted[key]
        ]
    assert view.planned.disk_bytes == wanted["disk_bytes"]
    time_row = next(row for row in wanted["decisions"] if row["feature"] == "step_time")
    hours = re.search(r"([\d.]+) h for all", time_row["reason"])
    assert view.planned.total_seconds / 3600 == pytest.approx(float(hours[1]) if hours else 0.0, abs=0.051)


def test_fields_tell_their_value_its_source_and_what_auto_became(studio: Studio) -> None:
    view = new_run(
        studio, Asked(start="flux1_dev_lora", facts=RTX_4090, presets=("style",), typed={"train.seed": "7"})
    )
    assert (shown(view, "train.seed").typed, shown(view, "train.seed").origin) == ("7", "you")
    assert shown(view, "train.seed").below == "0"
    assert shown(view, "lora.rank").origin == "preset style"
    assert shown(view, "train.max_grad_norm").origin == "file"
    assert shown(view, "train.optimizer").origin == "default"
    assert shown(view, "output_dir").origin == "studio"
    weights = shown(view, "features.weights")
    assert (weights.below, weights.decided) == ("auto", "fp8") and "needs" in weights.reason
    assert shown(view, "train.optimizer").decided == ""
    assert "+  seed: 7" in view.difference and "-  seed: 0" in view.difference


def test_every_mistake_is_at_its_field(studio: Studio) -> None:
    typed = {"lora__rank": "0", "train__num_train_epochs": "x", "data__sets__0__img_dir": "/etc"}
    view = new_run(studio, asked(**typed))
    assert view.planned.code is ExitCode.BAD_CONFIG and view.yaml == ""
    wrong = {one.field.key for one in view.fields if one.problems}
    assert wrong == {"lora.rank", "train.num_train_epochs"}
    view = new_run(studio, asked(data__sets__0__img_dir="/etc"))
    assert {one.field.key for one in view.fields if one.problems} == {"data.sets.0.img_dir"}


def test_each_way_out_of_a_run_that_does_not_fit_leads_out(studio: Studio) -> None:
    small = {"features__memory_budget": "8GiB", "data__resolution": "1536"}
    view = new_run(studio, asked(**small))
    assert view.planned.code is ExitCode.HARDWARE and view.planned.bars[0].state == "full"
    assert len(view.planned.ways_out) >= 2
    for way in view.planned.ways_out:
        typed = {**asked(**small).typed, **dict(way.values)}
        out = new_run(studio, Asked(start="flux1_dev_lora", facts=RTX_4090, typed=typed))
        assert out.planned.plan is not None, way
        assert way.peak == f"{out.planned.plan.peak_bytes / 2**30:.1f} GiB"


def test_a_base_without_its_files_is_no_access(studio: Studio) -> None:
    (studio.models / "flux").mkdir()
    view = new_run(studio, asked(model__pretrained_model_name_or_path="flux"))
    assert view.planned.code is ExitCode.NO_ACCESS and view.planned.problems


def test_where_there_is_no_access_to_a_repository_its_page_is_named() -> None:
    from trainer.errors import AccessError

    found = planned.of_error(AccessError("gated"), model="https://example.org/a/b")
    assert found.model_page == "https://example.org/a/b" and found.ways_out == ()


OUTSIDE = {
    "data.sets.0.img_dir": ["/etc", "../x", "a/../../x", "~root/x"],
    "output_dir": ["/tmp/x", "../runs2", ".", "a/../../b"],
    "data.cache_dir": ["/var/cache"],
    "model.pretrained_model_name_or_path": ["/etc", "../models2", "a/.."],
    "data.chat_template": ["/etc/x.jinja", "../x.jinja"],
    "lora.init_from": ["/elsewhere/x.safetensors"],
    "data.sets.0.control_dir": ["[/etc, /usr]", "[a, ../x]"],
}


@pytest.mark.parametrize(("key", "path"), [(key, path) for key, some in OUTSIDE.items() for path in some])
def test_paths_stay_below_the_roots(studio: Studio, key: str, path: str) -> None:
    start = "flux1_kontext_lora" if "control" in key else "flux1_dev_lora"
    view = new_run(studio, Asked(start=start, facts=RTX_4090, typed={key: path}))
    assert view.yaml == ""
    assert key in {one.field.key for one in view.fields if one.problems}


def test_a_link_out_of_a_root_is_outside(studio: Studio, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (studio.data / "link").symlink_to(tmp_path / "secret")
    assert new_run(studio, asked(data__sets__0__img_dir="link")).yaml == ""
    (studio.data / "cats").mkdir()
    view = new_run(studio, asked(data__sets__0__img_dir="cats"))
    assert f"img_dir: {studio.data}/cats\n" in view.yaml
    assert "cats" in shown(view, "data.sets.0.img_dir").places


def test_a_file_of_the_user_may_not_leave_the_roots_either(studio: Studio) -> None:
    text = f"family: flux1_dev\noutput_dir: {studio.runs}/a\ndata:\n  sets: [{{img_dir: /etc}}]\n"
    assert new_run(studio, Asked(start=OWN, own=text, facts=RTX_4090)).yaml == ""


def test_every_path_of_a_file_is_looked_at_however_many_sets_it_has(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a relative name of a base that is a folder where the studio was started."""
    sets = [{"img_dir": str(studio.data / name)} for name in ("a", "b", "c")]
    plain: dict[str, Any] = {
        "family": "flux1_dev",
        "output_dir": str(studio.runs / "mine"),
        "data": {"sets": sets},
    }
    assert new_run(studio, Asked(start=OWN, own=json.dumps(plain), facts=RTX_4090)).yaml
    for number in range(3):
        moved = [*sets[:number], {"img_dir": "/etc"}, *sets[number + 1 :]]
        own = json.dumps({**plain, "data": {"sets": moved}})
        view = new_run(studio, Asked(start=OWN, own=own, facts=RTX_4090))
        assert view.yaml == ""
        assert [one.what for one in view.planned.problems] == [
            f"`data.sets.{number}.img_dir`: /etc is outside of the studio's folders"
        ]
    monkeypatch.chdir(tmp_path)
    own = json.dumps({**plain, "model": {"pretrained_model_name_or_path": "some/base"}})
    assert new_run(studio, Asked(start=OWN, own=own, facts=RTX_4090)).yaml
    (tmp_path / "some/base").mkdir(parents=True)
    view = new_run(studio, Asked(start=OWN, own=own, facts=RTX_4090))
    assert "some/base is outside" in view.planned.problems[0].what


@pytest.mark.parametrize(
    "own", ["", "- a\n", "just words", "a: &b c", "{", "family: [x]\nmodel: 3\n", "data:\n"]
)
def test_a_file_that_is_no_configuration_is_told(studio: Studio, own: str) -> None:
    view = new_run(studio, Asked(start=OWN, own=own))
    assert view.planned.code is ExitCode.BAD_CONFIG and view.planned.problems


def test_a_file_named_as_a_shipped_one_is_not_trusted(studio: Studio) -> None:
    assert new_run(studio, Asked(start="flux1_dev_lora.yaml")).planned.code is ExitCode.BAD_CONFIG


def test_a_run_has_a_folder_that_is_not_there(studio: Studio) -> None:
    assert new_run(studio, asked()).name == "flux1-dev-lora"
    (studio.runs / "flux1-dev-lora").mkdir()
    assert new_run(studio, asked()).name == "flux1-dev-lora-2"
    assert new_run(studio, asked(output_dir="mine")).yaml.endswith(f"output_dir: {studio.runs}/mine\n")


@pytest.mark.parametrize(
    ("used", "state"), [(0, "fits"), (85, "fits"), (86, "tight"), (97, "tight"), (98, "full"), (130, "full")]
)
def test_bars_are_green_amber_and_red_by_their_share(used: int, state: str) -> None:
    rows = (MemoryRow("a", used // 2, ""), MemoryRow("b", used - used // 2, ""))
    bar = planned.bar("x", rows, 100)
    assert bar.state == state
    assert sum(one.width for one in bar.segments) == pytest.approx(100 * used / max(used, 100))
    assert bar.segments[1].start == pytest.approx(bar.segments[0].width)
    assert bar.limit == pytest.approx(100 * 100 / max(used, 100))


def test_a_plan_that_was_made_fits() -> None:
    assert planned.bar("x", (MemoryRow("a", 98, ""),), 100, planned=True).state == "tight"


def test_no_budget_is_red() -> None:
    assert planned.bar("x", (MemoryRow("a", 5, ""),), 0).state == "full"


def test_an_equal_form_is_planned_once_until_something_changes(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = list[int](), planned.whole_plan

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(planned, "whole_plan", counted)
    monkeypatch.setattr(planned, "_PLANS", {})
    (studio.data / "cats").mkdir()
    one = asked(data__sets__0__img_dir="cats", lora__rank="4")
    first = new_run(studio, one)
    assert new_run(studio, one).planned == first.planned and len(calls) == 1
    new_run(studio, asked(data__sets__0__img_dir="cats", lora__rank="8"))
    assert len(calls) == 2
    (studio.data / "cats" / "a.png").touch()  # the folder's stamp
    new_run(studio, one)
    assert len(calls) == 3
    new_run(studio, Asked(start=one.start, facts=(MACHINES / "h200.json").read_text(), typed=one.typed))
    assert len(calls) == 4


def test_facts_that_are_none_are_told(studio: Studio) -> None:
    view = new_run(studio, asked(facts='{"architecture": 3}'))
    assert view.planned.code is ExitCode.BAD_CONFIG
    assert "trainer probe --json" in view.planned.problems[0].remedy


def test_a_choice_of_method_leaves_the_files_lora_out(studio: Studio) -> None:
    view = new_run(studio, asked(facts=(MACHINES / "h200.json").read_text(), method="full"))
    assert view.yaml.startswith("family: flux1_dev\nmethod: full\n") and "lora:" not in view.yaml


def test_a_run_goes_to_the_queue_as_it_is(studio: Studio) -> None:
    view = new_run(studio, asked("quickstart", facts="", lora__rank="4", output_dir="mine"))
    job = Local(folder=environment.queue_dir()).job(new.add_to_queue(view))
    assert (job.name, job.run) == ("mine", studio.runs / "mine")
    # a folder that a waiting job will make is not free
    first = new_run(studio, asked("quickstart", facts=""))
    new.add_to_queue(first)
    assert (first.name, new_run(studio, asked("quickstart", facts="")).name) == ("quickstart", "quickstart-2")


def test_a_new_run_like_this_has_the_settings_of_now(studio: Studio) -> None:
    """Also in what stands beside the fields: the run went on with others since the form was shown."""
    config = made.make_run(studio.runs / "cats", family="flux1_dev") / "config.resolved.yaml"
    start, text = f"run:{identifier(studio.runs, config.parent)}", config.read_text()
    for steps in ("300", "999"):
        config.write_text(text.replace("max_train_steps: 300", f"max_train_steps: {steps}"))
        assert shown(new_run(studio, Asked(start=start)), "train.max_train_steps").below == steps


@pytest.mark.parametrize(
    ("typed", "places"), [("cats", ["cats"]), ("[cats, 'a, b', {data}/dogs]", ["cats", "a, b", "dogs"])]
)
def test_paths_of_lists_lie_below_the_root(studio: Studio, typed: str, places: list[str]) -> None:
    text = typed.format(data=studio.data)
    loaded, problems = loaded_of(studio, asked("flux1_kontext_lora", data__sets__0__control_dir=text))
    assert loaded is not None, problems
    assert control_folders(loaded.config.data.sets[0].control_dir) == tuple(
        studio.data / one for one in places
    )


def test_control_images_of_previews_lie_below_the_root(studio: Studio) -> None:
    typed = {"validation__control_images": f"cats/a.png\n[cats/b.png, {studio.data}/c.png]"}
    loaded, problems = loaded_of(
        studio, asked("flux1_kontext_lora", **typed, validation__prompts="a cat\na dog")
    )
    assert loaded is not None, problems
    data = studio.data
    assert loaded.config.validation.control_images == (
        data / "cats/a.png", (data / "cats/b.png", data / "c.png")
    )  # fmt: skip


def test_a_shipped_start_has_its_files_wherever_the_studio_was_started(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = new_run(studio, asked("quickstart", facts=""))
    job = new.add_to_queue(view)
    config = yaml.safe_load((environment.queue_dir() / f"jobs/{job}/config.yaml").read_text())
    assert Path(config["model"]["pretrained_model_name_or_path"]) == ROOT / "assets/tiny-flux"
    assert Path(config["data"]["sets"][0]["img_dir"]) == ROOT / "examples/style"
    assert Path(config["validation"]["img_dir"]) == ROOT / "examples/style-held-out"


def test_a_start_without_its_samples_is_refused(studio: Studio) -> None:
    view = new_run(studio, asked("quickstart", facts="", data__sets__0__img_dir="nothing"))
    with pytest.raises(DataError, match="nothing does not exist"):
        new.add_to_queue(view)
    (studio.data / "cats").mkdir()
    write_pair(studio.data / "cats", "a.png").with_suffix(".txt").unlink()
    view = new_run(studio, asked("quickstart", facts="", data__sets__0__img_dir="cats"))
    with pytest.raises(DataError, match="the image has no caption"):
        new.add_to_queue(view)


AI_TOOLKIT = """
job: extension
config:
  name: my_lora
  process:
    - type: sd_trainer
      trigger_word: p3r5on
      network: {type: lora, linear: 32, linear_alpha: 32}
      save: {dtype: float16, save_every: 250}
      datasets:
        - folder_path: /path/to/images
          cache_latents_to_disk: true
      train: {batch_size: 2, steps: 2000, lr: 2e-4, optimizer: adamw8bit, noise_scheduler: flowmatch}
      model: {name_or_path: Qwen/Qwen-Image, quantize: true}
"""
KOHYA = """
pretrained_model_name_or_path = "flux1-dev.safetensors"
network_dim = 8
network_alpha = 4.0
optimizer_type = "AdamW8bit"
max_train_epochs = 10
min_snr_gamma = 5
"""
MUSUBI = "accelerate launch train_network.py --network_dim 8 --learning_rate=3e-4 --sdpa --max_train_steps 90"


def test_a_file_of_ai_toolkit_is_translated_by_name(studio: Studio) -> None:
    form, rows = brought(studio, Asked(), AI_TOOLKIT)
    assert form.start == "qwen_image_lora"
    assert dict(form.typed) == {
        "output_dir": "my_lora",
        "data.trigger_word": "p3r5on",
        "lora.type": "lora",
        "lora.rank": "32",
        "lora.alpha": "32",
        "checkpoint.checkpointing_steps": "250",
        "train.train_batch_size": "2",
        "train.max_train_steps": "2000",
        "train.learning_rate": "2e-4",
        "train.optimizer": "adamw_8bit",
        "model.pretrained_model_name_or_path": "Qwen/Qwen-Image",
    }
    told = {row.name.rpartition(".")[2]: row for row in rows if not row.taken}
    assert "outside" in told["folder_path"].note and told["folder_path"].ours == "data.sets.0.img_dir"
    assert "switch" in told["cache_latents_to_disk"].note and "switch" in told["quantize"].note
    assert told["noise_scheduler"].ours == "" and "flow matching" in told["noise_scheduler"].note
    assert "expected" in told["dtype"].note
    assert new_run(studio, form).yaml


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        (
            KOHYA,
            {
                "lora.rank": "8",
                "lora.alpha": "4.0",
                "train.optimizer": "adamw_8bit",
                "train.num_train_epochs": "10",
            },
        ),
        (MUSUBI, {"lora.rank": "8", "train.learning_rate": "3e-4", "train.max_train_steps": "90"}),
        (f"CUDA_VISIBLE_DEVICES=0 {MUSUBI}", {"lora.rank": "8", "train.max_train_steps": "90"}),
        (MUSUBI.replace("accelerate launch", "python3"), {"lora.rank": "8"}),
        (MUSUBI.replace("accelerate launch", "python -u"), {"lora.rank": "8"}),
        (MUSUBI.replace("accelerate launch", "A=1 python3 -u"), {"lora.rank": "8"}),
        ('{"train": {"steps": 70}}', {"train.max_train_steps": "70"}),
    ],
)
def test_toml_command_lines_and_json_are_read_too(studio: Studio, text: str, typed: dict[str, str]) -> None:
    form, rows = brought(studio, Asked(start="flux1_dev_lora"), text)
    assert typed.items() <= form.typed.items()
    assert all(row.taken or row.note for row in rows)


def test_a_file_of_this_trainer_is_the_start(studio: Studio) -> None:
    text = (ROOT / "train_configs/flux1_dev_lora.yaml").read_text()
    form, rows = brought(studio, Asked(typed={"lora.rank": "3"}), text)
    assert (form.start, form.own, rows, form.typed) == (OWN, text, (), {})


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 90_000, "[" * 90_000, "{" * 90_000, "a: " * 90_000, "\0", "&a [*a]", "- 1", "x"]
)
def test_texts_that_break_readers_are_told(studio: Studio, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        brought(studio, Asked(), text)
    assert caught.value.problems


def test_a_long_list_of_keys_is_cut(studio: Studio) -> None:
    text = "".join(f"unknown_{number}: 1\n" for number in range(3000))
    _, rows = brought(studio, Asked(), f"network_dim: 4\n{text}")
    assert len(rows) == 500 and rows[0].taken
