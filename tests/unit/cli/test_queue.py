"""`trainer queue`: jobs added, listed, moved, held and forgotten; runs beside it that are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.data.pictures import write_pair, write_rows
from tests.unit.queue.fakes import FakeLocal, FakeMachine, wanted
from trainer import families
from trainer.cli import jobs, main, measure
from trainer.cli.options import Layers
from trainer.engine.caching.samples import scan_samples
from trainer.errors import DataError
from trainer.machine import driver
from trainer.machine.reading import read_recorded
from trainer.planning import planning
from trainer.queue import local as local_queue
from trainer.queue import scheduler
from trainer.queue.database import Machine
from trainer.queue.local import Local
from trainer.queue.overview import overview

ROOT = Path(__file__).parents[3]
MACHINES = ROOT / "tests/golden/machines"
UUIDS = ("GPU-aa-1", "GPU-ab-2")
TEXT = """\
family: flux1_dev
train: {max_train_steps: 100, gradient_accumulation_steps: 4, learning_rate: 1e-4}
data: {sets: [{img_dir: images}]}
output_dir: runs/cats
"""
Run = Callable[..., tuple[int, str, str]]
MEASURED: list[int] = []
"""One for each time that kernels were measured."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    found = FakeMachine(UUIDS)
    monkeypatch.setattr(local_queue, "gpu_uses", found.gpus)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration, on a machine with two GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(TEXT)
    (tmp_path / "images").mkdir()
    write_pair(tmp_path / "images", "cat.png")
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    facts = json.loads((MACHINES / "h200.json").read_text())
    (tmp_path / "facts.json").write_text(json.dumps({**facts, "gpus": 2 * facts["gpus"]}))
    monkeypatch.setenv("TRAINER_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_file_is_no_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one without jobs."""
    (tmp_path / "queue").write_text("x")
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    assert main(("queue", "list")) == 78
    out, err = capsys.readouterr()
    assert out == "" and "the queue's folder is no folder" in err


@pytest.fixture
def run(place: Path, machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return command


def queue(place: Path) -> Local:
    return Local(folder=place / "queue", gpus=tuple)


def named(place: Path) -> list[str]:
    return [job.name for job, _ in queue(place).jobs()]


def test_a_run_is_added_as_it_is_now(run: Run, place: Path) -> None:
    code, out, err = run("queue", "add", "my.yaml", "--set", "train.seed=7")
    assert (code, out) == (0, f"job 1: cats -> {place}/runs/cats\n")
    assert "nothing starts jobs now" in err
    (place / "my.yaml").write_text(TEXT.replace("100", "200"))
    kept = Layers([place / "queue/jobs/1/config.yaml"]).load().config
    assert (kept.train.max_train_steps, kept.train.seed) == (100, 7)
    ((job, _),) = queue(place).jobs()
    assert (job.gpus, job.count, job.working_folder, job.run) == ((), 1, place, place / "runs/cats")


def test_the_time_is_the_plans(run: Run, place: Path) -> None:
    run("queue", "add", "my.yaml", "--set", "train.max_train_steps=5000", "--set", "parallel.gpus=1")
    ((job, _),) = queue(place).jobs()
    _, text, _ = run("plan", "my.yaml", "--set", "train.max_train_steps=5000", "--set", "parallel.gpus=1")
    hours = re.search(r"([0-9.]+) h for all 20000", " ".join(text.split()))
    assert hours and job.seconds is not None
    assert job.seconds / 3600 == pytest.approx(float(hours[1]), abs=0.051)


@pytest.mark.parametrize(
    ("words", "gpus", "count"),
    [
        (["--on", "1"], UUIDS[1:], 1),
        (["--on", "1, 0"], UUIDS[::-1], 2),
        (["--on", "GPU-ab"], UUIDS[1:], 1),
        (["--gpus", "2"], (), 2),
        (["--gpus", "2", "--on", "0,1"], UUIDS, 2),
    ],
)
def test_gpus_are_chosen(run: Run, place: Path, words: list[str], gpus: Sequence[str], count: int) -> None:
    code, _, err = run("queue", "add", "my.yaml", *words)
    assert code == 0, err
    ((job, _),) = queue(place).jobs()
    assert (job.gpus, job.count) == (tuple(gpus), count)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ([], ()),  # either will do
        (["--set", "method=full"], UUIDS[1:]),  # of the larger one alone
        (["--gpus", "2", "--set", "parallel.gpus=2"], ("GPU-ab-2", "GPU-ac-3")),  # two that are alike
    ],
)
def test_where_gpus_differ_a_job_has_those_that_it_can_train_on(
    run: Run,
    machine: FakeMachine,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    gpus: Sequence[str],
) -> None:
    """The plan is of the kind with the most memory, and `turns` takes the first that are free."""
    small, large = (json.loads((MACHINES / f"{name}.json").read_text()) for name in ("rtx-4090", "h200"))
    count = 3 if "--gpus" in words else 2
    mixed = {**large, "gpus": [*small["gpus"], *(large["gpus"] * (count - 1))]}
    (place / "facts.json").write_text(json.dumps(mixed))
    machine.uuids = (*UUIDS, "GPU-ac-3")[:count]
    monkeypatch.setattr("trainer.queue.adding.visible_uuids", lambda: machine.uuids)
    code, _, err = run("queue", "add", "my.yaml", *words)
    assert code == 0, err
    assert queue(place).job("1").gpus == tuple(gpus)


def test_names_that_no_database_keeps_are_refused(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run("queue", "add", "my.yaml", "--name", "caf\udce9")
    assert code == 78 and "--name: 'caf\\udce9' is not UTF-8" in err
    inside = place / os.fsdecode(b"caf\xe9")
    shutil.copytree(place / "images", inside / "images")
    shutil.copy(place / "my.yaml", inside)
    monkeypatch.chdir(inside)
    code, _, err = run("queue", "add", "my.yaml")
    assert code == 78 and "is not UTF-8" in err
    assert not queue(place).jobs()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_job_without_gpu_has_the_lease_of_the_cpu(
    run: Run, machine: FakeMachine, place: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    """By name, and where there is no GPU."""
    if hidden:
        machine.uuids = ()
        monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "cpu.json"))
    monkeypatch.chdir(ROOT)
    words = ["queue", "add", "train_configs/quickstart.yaml", "--output", str(place / "run")]
    code, _, err = run(*words, *([] if hidden else ["--on", "cpu"]))
    assert code == 0, err
    ((job, _),) = queue(place).jobs()
    assert (job.gpus, job.count, job.working_folder) == (("cpu",), 1, ROOT)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--on", "2"], 78, "GPUs here: 0 (Fake, GPU-aa-1), 1 (Fake, GPU-ab-2)"),
        (["--on", ""], 78, 'no GPU is called ""'),
        (["--on", "GPU-a"], 78, '"GPU-a" names 2 GPUs'),
        (["--on", "0,0"], 78, "name different GPUs"),
        (["--on", "0,cpu"], 78, "name different GPUs"),
        (["--on", "0", "--gpus", "2"], 78, "parallel.gpus is 2, and 1 are named"),
        (["--gpus", "3"], 69, "GPU"),
        (["--set", "lora.rnak=8"], 78, "did you mean `rank`?"),
        (["--budget", "2GiB"], 69, "GiB"),
        (["--vary", "lora.rank=8"], 78, "names no two values of a key"),
        (["--vary", "lora.rank=8,8"], 78, "two of these jobs write there"),
        (["--vary", "lora.rank=8,none"], 78, "lora.rank"),
    ],
)
def test_a_job_that_cannot_run_is_refused_at_once(
    run: Run, place: Path, words: list[str], code: int, said: str
) -> None:
    got, out, err = run("queue", "add", "my.yaml", *words)
    assert (got, out) == (code, "")
    assert said in err
    assert named(place) == []


def test_gpus_whose_users_nobody_can_tell_are_refused(run: Run, machine: FakeMachine, place: Path) -> None:
    machine.uuids = ()
    code, _, err = run("queue", "add", "my.yaml")
    assert code == 69
    assert "NVML" in err
    assert named(place) == []


def test_samples_that_are_not_there_are_refused_at_once(run: Run, place: Path) -> None:
    (place / "images").rename(place / "away")
    code, _, err = run("queue", "add", "my.yaml", "--set", "validation.img_dir=held-out")
    assert code == 65
    for words in ("`data.sets.0.img_dir`: images does", "my.yaml:3", "`validation.img_dir`: held-out does"):
        assert words in err
    assert named(place) == []
    (place / "away").rename(place / "images")
    assert run("queue", "add", "my.yaml")[0] == 0


def nameless(folder: Path, *names: str) -> None:
    """Pictures without captions."""
    folder.mkdir(exist_ok=True)
    for name in names:
        write_pair(folder, name, seed=sum(name.encode())).with_suffix(".txt").unlink()


BAD_SETS: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "no caption": (lambda place: nameless(place / "images", "bare.png"), ()),
    "no row": (
        lambda place: [nameless(place / "images", "bare.png"), write_rows(place / "images", [])],
        (),
    ),
    "an empty caption": (lambda place: write_pair(place / "images", "bee.png", " "), ()),
    "held out": (lambda place: nameless(place / "held-out", "x.png"), ("validation.img_dir=held-out",)),
    "both": (
        lambda place: [nameless(place / one, f"{one}.png") for one in ("images", "held-out")],
        ("validation.img_dir=held-out",),
    ),
    "nothing there": (lambda place: [one.unlink() for one in (place / "images").iterdir()], ()),
    "nothing left": (
        lambda place: [(place / "images/cat.txt").unlink(), nameless(place / "images", "b.png")],
        ("data.on_bad_file=skip",),
    ),
}


@pytest.mark.parametrize("case", BAD_SETS)
def test_pictures_that_the_run_would_refuse_are_refused_at_once(run: Run, place: Path, case: str) -> None:
    """In the run's own words, which its scan gives when it has opened all pictures."""
    spoil, sets = BAD_SETS[case]
    spoil(place)
    words = [word for one in sets for word in ("--set", one)]
    code, _, err = run("queue", "add", "my.yaml", *words)
    assert (code, named(place)) == (65, [])
    loaded = Layers([place / "my.yaml"], sets).load()
    with pytest.raises(DataError) as told:
        scan_samples(families.get("flux1_dev"), loaded.config)
    for problem in told.value.problems:
        assert problem.what in err and problem.where in err and problem.remedy in err


def test_pictures_that_the_run_leaves_out_keep_no_job_away(run: Run, place: Path) -> None:
    nameless(place / "images", "bare.png")
    assert run("queue", "add", "my.yaml", "--set", "data.on_bad_file=skip")[0] == 0
    # whether a picture can be decoded the run tells
    (place / "images/bare.png").unlink()
    write_pair(place / "images", "broken.png").write_bytes(b"no picture")
    assert run("queue", "add", "my.yaml", "--output", "other")[0] == 0


def test_a_run_folder_has_one_name_however_it_is_written(run: Run, place: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to(place / "real")
    assert (
        run("queue", "add", "my.yaml", "--output", "link/../real/cats")[1]
        == f"job 1: cats -> {place}/real/cats\n"
    )
    assert run("queue", "add", "my.yaml", "--output", "link/cats")[0] == 78, "another job writes there"


def test_a_group_has_a_job_for_each_value(run: Run, place: Path) -> None:
    code, out, _ = run("queue", "add", "my.yaml", "--name", "ranks", "--vary", "lora.rank=8,16,32")
    assert code == 0
    assert out.splitlines()[1] == f"job 2: ranks-rank-16 -> {place}/runs/cats-rank-16"
    assert [job.group for job, _ in queue(place).jobs()] == ["ranks"] * 3
    ranks = [
        Layers([place / f"queue/jobs/{job}/config.yaml"]).load().config.lora.rank for job in ("1", "2", "3")
    ]
    assert ranks == [8, 16, 32]
    words = ["--vary", "data.trigger_word=../b c,d", "--vary", "train.seed=1,2"]
    assert run("queue", "add", "my.yaml", *words)[0] == 0
    assert [str(job.run.relative_to(place)) for job, _ in queue(place).jobs()][3:] == [
        "runs/cats-trigger_word-.._b_c-seed-1",
        "runs/cats-trigger_word-d-seed-2",
    ]


def test_jobs_are_called_by_number_name_or_group(run: Run, place: Path) -> None:
    queue(place).submit([wanted("cats"), wanted("rank-8", group="ranks"), wanted("rank-16", group="ranks")])
    assert run("queue", "move", "ranks", "1") == (0, "", "")
    assert named(place) == ["rank-8", "rank-16", "cats"]
    assert run("queue", "hold", "ranks", "1")[0] == 0
    assert {seen.state for _, seen in queue(place).jobs()} == {"held"}
    assert run("queue", "hold", "--release", "cats")[0] == 0
    code, out, err = run("queue", "list")
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["2", "rank-8", "ranks", "held"],
        ["3", "rank-16", "ranks", "held"],
        ["1", "cats", "waiting", "any"],
    ]
    assert "nothing starts jobs now" in err
    assert run("queue", "stop", "--forget", "ranks") == (0, "", "")
    assert named(place) == ["cats"]
    fake = FakeLocal(place / "queue", FakeMachine(UUIDS, identity=Machine.here()))
    fake.start_due()
    fake.fake.live()[0].end(70)
    queue(place).submit([wanted("dogs")])
    code, _, err = run("queue", "hold", "cats", "dogs")  # the one that can be held is
    assert (code, queue(place).state("4").state) == (78, "held")
    assert "cats (job 1) has ended: exit code 70" in err
    code, _, err = run("queue", "stop", "catz")
    assert code == 78
    assert "did you mean `cats`?" in err


@pytest.mark.parametrize(
    "words",
    [
        ("stop", ""),
        ("stop", "1", "", "--forget"),
        ("hold", ""),
        ("move", "", "1"),
        ("assign", "", "--on", "any"),
        ("assign", "1", "--on", ""),
        ("log", ""),
    ],
    ids=" ".join,
)
def test_an_empty_name_is_no_job(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    """A variable of a script that is not set: it would mean every job without a group."""
    monkeypatch.setattr("trainer.queue.local.usable_gpus", FakeMachine(UUIDS[:1]).gpus)
    queue(place).submit([wanted("cats"), wanted("dogs"), wanted("rank-8", group="ranks")])
    before = queue(place).jobs()
    code, out, err = run("queue", *words)
    assert (code, out) == (78, "")
    assert 'got ""' in err or 'called ""' in err
    assert queue(place).jobs() == before


def test_a_number_is_that_job_alone_and_a_group_keeps_its_order(run: Run, place: Path) -> None:
    queue(place).submit([wanted("a-8", group="a"), wanted("a-16", group="a"), wanted("1"), wanted("c")])
    assert run("queue", "hold", "1")[0] == 0
    assert [seen.state for _, seen in queue(place).jobs()] == ["held", "waiting", "waiting", "waiting"]
    assert run("queue", "move", "a", "2")[0] == 0
    assert named(place) == ["1", "a-8", "a-16", "c"]


def test_jobs_are_given_other_gpus_by_number(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(UUIDS, identity=Machine.here())
    monkeypatch.setattr("trainer.queue.local.usable_gpus", machine.gpus)
    queue(place).submit([wanted("cats"), wanted("rank-8", group="ranks"), wanted("rank-16", group="ranks")])
    assert run("queue", "assign", "ranks", "--on", "1") == (0, "", "")
    assert [job.gpus for job, _ in queue(place).jobs()] == [(), (UUIDS[1],), (UUIDS[1],)]
    assert run("queue", "assign", "rank-8", "cats", "--on", "any") == (0, "", "")
    assert [job.gpus for job, _ in queue(place).jobs()] == [(), (), (UUIDS[1],)]
    assert run("queue", "assign", "cats", "--on", f"1,{UUIDS[1]}") == (0, "", "")  # one GPU, named twice
    assert queue(place).job("1").gpus == (UUIDS[1],)
    assert run("queue", "assign", "cats", "--on", "any") == (0, "", "")
    code, _, err = run("queue", "assign", "cats", "--on", "0,1")
    assert code == 78 and "cats (job 1) takes 1, and 2 are named" in err
    code, _, err = run("queue", "assign", "cats", "--on", "9")
    assert code == 78 and 'no GPU is called "9"' in err
    assert queue(place).job("1").gpus == ()


def test_names_give_no_orders_to_the_terminal(run: Run, place: Path) -> None:
    queue(place).submit([wanted("a\x1b[2Jb\nc")])
    _, out, _ = run("queue", "list")
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def test_the_log_is_printed_from_its_end(run: Run, place: Path) -> None:
    queue(place).submit([wanted("cats")])
    (place / "queue/jobs/1/output.log").write_text("one\ntwo\x1b[0m\nthree\n")
    assert run("queue", "log", "cats", "--lines", "2") == (0, "two\\x1b[0m\nthree\n", "")


def test_an_empty_queue_is_said_and_drained(run: Run, place: Path) -> None:
    assert run("queue", "list") == (0, "no jobs\n", "")
    assert run("queue", "run", "--drain")[0] == 0
    queue(place).submit([wanted("cats", held=True)])
    code, _, err = run("queue", "run", "--drain")
    assert code == 0
    assert "no more jobs are started" in err


def test_a_scheduler_tells_what_happens(place: Path, machine: FakeMachine) -> None:
    held = FakeLocal(place / "queue", machine)
    held.submit([wanted("cats", (UUIDS[0],)), wanted("dogs", (UUIDS[0],))])
    told: list[str] = []

    def tell(text: str) -> None:
        """Each run ends when its start was told of."""
        told.append(text)
        assert scheduler.is_scheduled(held.folder)
        for started in machine.live():
            started.end(0 if started.start.job.id == 1 else 70)

    scheduler.run(held, tell, received=(), drain=True)
    assert told[:3] == ["cats (job 1): running", "cats (job 1): finished", "dogs (job 2): running"]
    assert told[3].startswith("dogs (job 2): failed, exit code 70: the loss")
    assert len(told) == 4
    assert not scheduler.is_scheduled(held.folder)


@pytest.fixture
def train(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`trainer train` on the recorded machine, up to the start of its process, which says 42."""
    facts = read_recorded(MACHINES / "h200.json")
    monkeypatch.setattr(driver, "visible_uuids", lambda: UUIDS)
    monkeypatch.setattr(planning, "machine_facts", lambda: facts)
    monkeypatch.setattr(planning, "prepare_base", lambda loaded: None)
    for name in ("measure_links", "measure_reading"):
        monkeypatch.setattr(measure, name, lambda loaded, facts, *_, **__: facts)
    monkeypatch.setattr(measure, "measure_kernels", lambda loaded, facts, *_: MEASURED.append(1) or facts)
    monkeypatch.setattr(jobs, "run_job", lambda *_, **__: 42)
    monkeypatch.setenv("TRAINER_METRICS_PORT", "0")

    def command(*words: str) -> tuple[int, str]:
        code, _, err = run("train", "my.yaml", *words)
        return code, err

    return command


def test_a_run_beside_the_queue_keeps_off_its_gpus(
    train: Callable[..., tuple[int, str]],
    place: Path,
    machine: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train()[0] == 42  # where there is no queue, none is made
    assert not (place / "queue").exists()
    held = FakeLocal(place / "queue", machine)
    held.submit([wanted("dogs", UUIDS[1:]), wanted("cats-3", UUIDS[:1])])
    assert train()[0] == 42  # jobs that wait have nothing yet
    held.start_due()
    MEASURED.clear()
    code, err = train()
    assert code == 69
    assert not MEASURED, "kernels were measured beside a job"
    assert f"{UUIDS[0]} is leased to cats-3 (job 2) of the queue" in err
    assert "dogs" not in err
    assert "--share-gpu" in err
    assert train("--share-gpu")[0] == 42 and MEASURED
    with monkeypatch.context() as patch:  # the run of that job itself
        patch.setenv("TRAINER_QUEUE_JOB", "2")
        assert train()[0] == 42
        patch.setenv("TRAINER_QUEUE_JOB", "1")
        assert train()[0] == 69
    # its lease is still written down, and its run is over
    next(one for one in machine.live() if one.start.job.id == 2).end(0)
    assert train()[0] == 42


def test_a_queue_that_cannot_be_used_stops_no_run(train: Callable[..., tuple[int, str]], place: Path) -> None:
    (place / "queue").mkdir()
    (place / "queue/queue.sqlite").write_bytes(b"no database, of a length that a header has" * 100)
    code, err = train()
    assert code == 42
    assert "warning: jobs of the queue are not kept off this run's GPUs" in err


def test_jobs_wait_for_a_run_beside_the_queue_from_its_start(
    train: Callable[..., tuple[int, str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has a context on its GPU, which is all that NVML can show."""
    held = FakeLocal(place / "queue", FakeMachine(UUIDS, identity=Machine.here()))
    held.submit([wanted("cats", UUIDS[:1]), wanted("dogs", UUIDS[1:])])
    started: list[list[str]] = []
    notes: list[str] = []

    def run_job(*_: object, **__: object) -> int:
        started.append([job.name for job in held.start_due()])
        notes.extend(entry.note for entry in overview(held))
        return 42

    monkeypatch.setattr(jobs, "run_job", run_job)
    assert train()[0] == 42
    assert started == [["dogs"]]
    assert notes[0] == "waits for GPU 0, in use by a run that was started beside the queue"
    assert [job.name for job in held.start_due()] == ["cats"]


def test_a_stop_by_the_run_folder_stops_the_job(run: Run, place: Path) -> None:
    held = FakeLocal(place / "queue", FakeMachine(UUIDS, identity=Machine.here()))
    held.submit([wanted("cats", root=place)])
    held.start_due()
    code, _, err = run("runs", "control", str(place / "cats"), "stop", "--wait")
    assert (code, held.state("1").state) == (0, "stopping"), err
    held.fake.live()[0].end(75)
    assert held.state("1").state == "held"
    assert held.start_due() == []
    assert run("runs", "control", str(place / "cats"), "stop")[0] == 78
