"""`trainer runs`: what runs were told and what came of them, as a table, CSV and a picture."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trainer.cli import main
from trainer.errors import Problem
from trainer.telemetry.curves import COLOURS
from trainer.telemetry.run_folder import process


def a_run(folder: Path, *, rank: int, losses: tuple[float | None, ...], finished: bool = True) -> Path:
    """A finished run's folder: one log step per loss, and a held-out loss at every second one."""
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(
        f"family: tiny\nmethod: lora\nlora:\n  rank: {rank}\ntrain:\n  max_train_steps: 40\n"
        f"data:\n  sets:\n  - img_dir: /data\noutput_dir: {folder}\n"
    )
    rows: list[dict[str, object]] = [{"step": 0, "validation_loss": 2.0, "validation_data": "x"}]
    for number, loss in enumerate(losses, start=1):
        row: dict[str, object] = {"step": 10 * number, "loss": loss, "seconds_per_step": 0.5}
        row["device_memory_reserved_peak_bytes"] = 3 * 1024**3
        if number % 2 == 0:
            row |= {"validation_loss": 2.0 / number, "validation_data": "x"}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "lora").mkdir()
        (folder / "lora" / "x.safetensors").touch()
    else:
        (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    a_run(Path("runs/one"), rank=16, losses=(1.0, 0.8, 0.5, 0.25))
    a_run(Path("runs/more/two"), rank=32, losses=(1.2, None), finished=False)
    return Path("runs")


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "family", "method", "state"]
    assert first.split()[:5] == ["runs/more/two", "tiny", "lora", "resumable", "20/40"]
    assert second.split()[:6] == ["runs/one", "tiny", "lora", "finished", "40/40", "0.25"]
    assert "2 -> 0.5 (-75 %)" in second and second.split()[-2:] == ["0.5", "3.0"]


def test_show_says_how_it_ended_and_names_lora_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "more/two"
    process.begin(run, supervisor=1, runtime_dir=folder)
    problem = Problem(what="the host runs out of memory")
    process.end(run, supervisor=1, exit_code=71, cause="", problems=[problem])
    (run / "checkpoints/step-000010/lora").mkdir()
    (run / "checkpoints/step-000010/lora/two.safetensors").touch()
    assert main(["runs", "show", str(run)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert rows["exit"] == "71: out of memory, or a memory floor was reached"
    assert rows["cause"] == "the host runs out of memory"
    assert rows["checkpoints"].startswith("step-000010 (")
    assert rows["LoRA"].split() == ["file", "checkpoints/step-000010/lora/two.safetensors"]
    assert main(["runs", "list", str(folder), "--csv"]) == 0
    assert [row["exit"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["71", ""]


def test_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "runs/one", "runs/more", "--csv"]) == 0
    head, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    named = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["run"] for row in named] == ["runs/one", "runs/more/two"]
    assert [row["loss"] for row in named] == ["0.25", ""]
    assert named[0]["peak GiB"] == "3.0"
    assert (named[0]["TFLOP/s"], named[0]["MFU"]) == ("", ""), "of an older run"


def test_speed_is_that_of_the_last_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "one/metrics.jsonl").open("a") as log:
        row = {"step": 40, "loss": 0.25, "model_tflops": 703.4, "mfu": 0.711}
        log.write(json.dumps(row) + "\n")
    assert main(["runs", "list", "runs/one", "--csv"]) == 0
    head, row_of_run = csv.reader(io.StringIO(capsys.readouterr().out))
    named = dict(zip(head, row_of_run, strict=True))
    assert (named["TFLOP/s"], named["MFU"]) == ("703", "71%")


def test_compare_shows_what_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", "runs/one", "runs/more/two", "--csv"]) == 0
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(capsys.readouterr().out))}
    assert rows[""] == ["one", "two"]
    assert rows["lora.rank"] == ["16", "32"]
    assert rows["step"] == ["40/40", "20/40"]
    # what is the same, and the folders themselves, is no difference
    assert not {"train.max_train_steps", "data.sets.0.img_dir", "output_dir"} & rows.keys()


def test_compare_shows_ranks_of_layers_whose_names_hold_dots(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, rank in (("runs/one", 8), ("runs/more/two", 4)):
        path, pattern = Path(run, "config.resolved.yaml"), f"  rank_pattern: {{blocks.0.to_q: {rank}}}\n"
        path.write_text(path.read_text().replace("lora:\n", f"lora:\n{pattern}"))
    assert main(["runs", "compare", "runs/one", "runs/more/two", "--csv"]) == 0
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(capsys.readouterr().out))}
    assert rows["lora.rank_pattern.blocks.0.to_q"] == ["8", "4"]


def test_runs_of_one_name_are_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(Path("other/one"), rank=8, losses=(1.0,))
    assert main(["runs", "compare", "runs/one", "other/one", "--csv"]) == 0
    assert capsys.readouterr().out.startswith(",runs/one,other/one\n")


def test_plot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", "runs/one", "runs/more/two", "--plot", "losses.png"]) == 0
    picture = Image.open("losses.png")
    assert picture.format == "PNG"
    counts = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24) or []}

    def pixels(colour: str) -> int:
        return counts.get(tuple(bytes.fromhex(colour[1:])), 0)

    # the line of the first run is long; the second has one loss, and dots
    assert pixels(COLOURS[0]) > 1000
    assert 100 < pixels(COLOURS[1]) < 800
    assert pixels(COLOURS[2]) == 0


def test_a_falling_loss_falls_in_the_picture(folder: Path) -> None:
    a_run(Path("falling"), rank=1, losses=(1.0, 0.1))
    main(["runs", "list", "falling", "--plot", "falling.png"])
    picture = Image.open("falling.png").convert("RGB")
    colour = tuple(bytes.fromhex(COLOURS[0][1:]))
    rows = [
        [y for y in range(24, 660) if picture.getpixel((x, y)) == colour] for x in (700, 1100)
    ]  # the losses are at steps 10 and 20 of 20: from the middle to the right
    assert rows[0] and rows[1] and min(rows[0]) < min(rows[1])


def test_names_of_runs_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib would read `$` as a formula, and hide a name that begins with an underscore."""
    from matplotlib.figure import Figure

    shown: list[str] = []
    draw = Figure.savefig

    def savefig(self: Figure, *given: Any, **named: Any) -> None:
        draw(self, *given, **named)
        shown.extend(text.get_text() for text in self.legends[0].get_texts())

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.chdir(tmp_path)
    for name in ("_one", "$2$"):
        a_run(Path(name), rank=1, losses=(1.0,))
    assert main(["runs", "compare", "_one", "$2$", "--plot", "losses.png"]) == 0
    assert shown == [f"loss and held-out loss of {name}" for name in ("_one", "$2$")]


def test_without_matplotlib_the_install_line_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["runs", "list", "runs", "--plot", "losses.png"]) == 78
    said = capsys.readouterr().err
    assert "--plot: matplotlib is not installed" in said
    assert "pip install -c constraints.txt -e '.[plots]'" in said
    assert not Path("losses.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["runs", "list", "nowhere"], 78, "nowhere: no such folder"),
        (["runs", "list", "empty"], 78, "empty: no run is in this folder"),
        (["runs", "compare", "damaged"], 65, "config.resolved.yaml:1: not valid YAML"),
        (["runs", "list", "torn"], 0, "warning: torn: 1 damaged lines of its metrics are left out"),
        (["runs", "list", "damaged"], 65, "config.resolved.yaml:1: not valid YAML"),
        (["runs", "list", "begun", "--plot", "x.png"], 78, "no run has a loss yet"),
        (["runs", "list", "runs", "--plot", "empty"], 78, "--plot empty: it exists, and is no file"),
        (["runs", "list", "runs", "--plot", "begun/config.resolved.yaml/x.png"], 78, "a file stands where"),
        (["runs", "list", "runs", "--plot", "/proc/x.png"], 78, "/proc cannot be written: "),
        (["runs"], 78, "Usage"),
    ],
)
def test_mistakes(
    arguments: list[str], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    a_run(Path("damaged"), rank=1, losses=())
    Path("damaged/config.resolved.yaml").write_text("]\n")
    a_run(Path("torn"), rank=1, losses=())
    Path("torn/metrics.jsonl").write_text("{torn\n")
    a_run(Path("begun"), rank=1, losses=())
    Path("begun/metrics.jsonl").unlink()
    assert main(arguments) == code
    assert said in capsys.readouterr().err


def test_a_damaged_run_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(Path("runs/worse"), rank=1, losses=())
    Path("runs/worse/config.resolved.yaml").write_text("]\n")
    assert main(["runs", "list", "runs"]) == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["run", "runs/more/two", "runs/one"]
    assert "warning: runs/worse/config.resolved.yaml:1: not valid YAML" in told.err


@pytest.mark.parametrize("locked", ["runs/more", "runs"])
def test_a_folder_that_may_not_be_entered_is_told(
    locked: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.is_file

    def is_file(path: Path) -> bool:  # permission bits do not hold root
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    code = main(["runs", "list", "runs"])
    told = capsys.readouterr()
    assert f"{locked}: this user may not look into it" in told.err
    assert (code, "runs/one" in told.out) == ((0, True) if locked == "runs/more" else (78, False))


def test_a_run_that_may_not_be_entered_is_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    assert main(["runs", "show", "runs/one"]) == 73
    assert "runs/one: Permission denied while reading it" in capsys.readouterr().err


def test_a_run_that_trains_is_running(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = Path("runs/more/two/.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        main(["runs", "list", "runs/more"])
        assert capsys.readouterr().out.splitlines()[1].split()[3] == "running"
    main(["runs", "list", "runs/more"])
    assert capsys.readouterr().out.splitlines()[1].split()[3] == "resumable"


def test_show_has_a_row_a_round_and_says_why_a_run_ended_early(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path("runs/one/metrics.jsonl")
    rows = [
        {"step": 20, "pictures": 2, "score_data": "h", "clip_t": 0.25, "copied": 0},
        {"step": 40, "pictures": 2, "score_data": "h", "clip_t": 0.3, "copied": 1},
        {"step": 40, "early_stop": "early stop at step 40: because"},
    ]
    log.write_text(log.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    assert main(["runs", "show", "runs/one"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["state", "finished", "early"] in [line.split() for line in lines]
    assert lines[-6:-4] == ["early stop at step 40: because", ""]
    table = [line.split() for line in lines[-4:]]
    assert table[0] == ["step", "validation_loss", "clip_t", "copied"]
    assert table[1:] == [["0", "2"], ["20", "1", "0.25", "0"], ["40", "0.5", "0.3", "1"]]
    assert main(["runs", "show", "runs/one", "--csv"]) == 0
    read = [*csv.reader(io.StringIO(capsys.readouterr().out))]
    assert read == [[*table[0]], ["0", "2", "", ""], *table[2:]]
    # with more patience the run went on: it did not end there
    log.write_text(log.read_text() + json.dumps({"step": 50, "loss": 0.2}) + "\n")
    assert main(["runs", "list", "runs/one"]) == 0
    assert "finished early" not in capsys.readouterr().out
    assert main(["runs", "show", "runs"]) == 78
    assert "no run is in this folder" in capsys.readouterr().err
