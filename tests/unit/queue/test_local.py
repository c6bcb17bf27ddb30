"""The queue of one machine: what it takes in, what it refuses, what follows from each end."""

from __future__ import annotations

import fcntl
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.queue.fakes import FakeLocal, FakeMachine, wanted
from trainer.errors import ConfigError, ExitCode, StorageError
from trainer.machine.occupancy import GpuUse
from trainer.queue import database, jobfiles
from trainer.queue.database import Machine
from trainer.queue.launcher import CPU, Launcher, State
from trainer.queue.local import Local, Start
from trainer.queue.overview import overview
from trainer.queue.turns import Due
from trainer.telemetry.status import Phase, StatusWriter

A, B = "GPU-a", "GPU-b"


def test_it_is_a_launcher(queue: FakeLocal) -> None:
    launcher: Launcher = queue
    (job,) = launcher.submit([wanted("cats")])
    assert launcher.state(job).state is State.WAITING
    assert launcher.log(job) == ""
    launcher.stop(job)
    assert launcher.state(job).state is State.HELD


@pytest.mark.parametrize("code", [*ExitCode, 1, 130, 137, 143])
def test_every_exit_code_decides(queue: FakeLocal, machine: FakeMachine, code: int) -> None:
    """0 is over, 75 or 76 that nobody asked for goes again, and nothing else is tried again by itself."""
    queue.submit([wanted("cats", (A,)), wanted("dogs", (A,))])
    queue.start_due()
    machine.live()[0].end(code)
    if code in (75, 76):
        assert queue.state("1").state is State.WAITING
        (again,) = queue.start_due()
        assert (again.id, machine.live()[0].start.gpus) == (1, (A,))  # before the one behind it
        machine.live()[0].end(None)
        assert queue.state("1").state is State.LOST  # the code was that of the start before
        return
    seen = queue.state("1")
    assert seen.state is (State.FINISHED if code == 0 else State.FAILED)
    assert seen.exit_code == code
    assert code == 0 or f"exit code {code}: " in seen.words
    (next_one,) = queue.start_due()
    assert next_one.id == 2
    machine.live()[0].end(0)
    assert queue.start_due() == []
    if code:
        queue.release("1")
        assert [job.id for job in queue.start_due()] == [1]


def test_a_stop_on_request_is_held(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("cats", (A,))])
    queue.start_due()
    queue.stop("1")
    assert queue.state("1").state is State.STOPPING
    (run,) = machine.live()
    assert jobfiles.asked_to_stop(run.folder, run.start.job.start)
    run.end(75)
    assert queue.state("1").state is State.HELD
    assert queue.start_due() == []
    queue.release("1")
    queue.start_due()
    (again,) = machine.live()
    # the request was for the last start
    assert not jobfiles.asked_to_stop(again.folder, again.start.job.start)
    assert queue.state("1").state is State.RUNNING


def test_a_stop_that_is_taken_back_goes_again(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("cats", (A,))])
    queue.start_due()
    queue.stop("1")
    queue.release("1")
    assert queue.state("1").state is State.RUNNING
    machine.live()[0].end(75)  # it had seen the request
    assert [job.id for job in queue.start_due()] == [1]


def test_a_configuration_is_kept_as_it_was(queue: FakeLocal, machine: FakeMachine) -> None:
    name = "$(touch x); --flag 'é' \n<b>"
    queue.submit([wanted(name, (A,), config="family: $(touch x)\n")])
    queue.start_due()
    (run,) = machine.live()
    assert (run.folder / "config.yaml").read_text() == "family: $(touch x)\n"
    assert queue.jobs()[0][0].name == name
    assert run.folder == queue.folder / "jobs" / "1"


def test_all_of_a_group_or_none(queue: FakeLocal) -> None:
    good = [wanted(f"rank-{rank}", group="ranks") for rank in (8, 16)]
    for bad in (wanted("three", count=3), wanted("gone", ("GPU-x",)), wanted("rank-8")):
        with pytest.raises(ConfigError):
            queue.submit([*good, bad])
        assert queue.jobs() == []
    assert queue.submit(good) == ["1", "2"]
    assert [job.group for job, _ in queue.jobs()] == ["ranks", "ranks"]


def test_a_run_folder_is_one_jobs_until_it_ends(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("cats", (A,))])
    with pytest.raises(ConfigError, match=r"cats \(job 1\) writes there"):
        queue.submit([wanted("cats", (B,))])
    queue.start_due()
    machine.live()[0].end(70)
    assert queue.submit([wanted("cats", (B,))]) == ["2"]
    queue.release("1")
    # two jobs that go on with one folder: one at a time, although their GPUs are free
    assert [job.id for job in queue.start_due()] == [1]
    assert queue.start_due() == []
    assert "another run that trains in its folder" in overview(queue)[1].note
    machine.live()[0].end(0)
    assert [job.id for job in queue.start_due()] == [2]


def test_a_run_by_hand_in_the_folder_is_waited_for(queue: FakeLocal, tmp_path: Path) -> None:
    queue.submit([wanted("cats", (B,), root=tmp_path), wanted("dogs", (A,), root=tmp_path)])
    (tmp_path / "cats").mkdir()
    with (tmp_path / "cats" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [job.name for job in queue.start_due()] == ["dogs"]
        queue.submit([wanted("more", (B,), root=tmp_path)])
        cats, _, more = overview(queue)
        assert (cats.note, cats.due) == ("waits for another run that trains in its folder", None)
        assert more.due is not None and more.due.seconds == 0, "cats takes no GPU meanwhile"


def test_another_program_on_a_gpu_is_waited_for_and_named(queue: FakeLocal, machine: FakeMachine) -> None:
    machine.foreign = {A: 4711}
    queue.submit([wanted("cats", (A,)), wanted("dogs"), wanted("both", count=2)])
    assert [job.name for job in queue.start_due()] == ["dogs"]
    assert machine.live()[0].start.gpus == (B,)
    cats, dogs, both = overview(queue)
    assert (dogs.gpus, dogs.seen.state) == ("GPU 1", State.RUNNING)
    assert cats.note == "waits for GPU 0, in use by PID 4711"
    assert both.note == "waits for GPU 0, in use by PID 4711; GPU 1, held by dogs (job 2), preparing"
    assert both.due is None
    machine.foreign = {}
    assert [job.name for job in queue.start_due()] == ["cats"]


def test_memory_that_nobody_here_holds_is_somebodys() -> None:
    idle = GpuUse(uuid=A, index=0, name="Fake", total_bytes=100, used_bytes=10)
    assert idle.use == ""
    assert "cannot be seen from here" in replace(idle, used_bytes=11).use
    assert replace(idle, pids=(3, 4)).use == "in use by PID 3, 4"
    assert replace(idle, total_bytes=None, used_bytes=None).use == ""  # the host's memory


def test_a_process_that_sees_no_gpu_may_add_for_one_that_does(queue: FakeLocal, machine: FakeMachine) -> None:
    machine.gone = {A, B}
    queue.submit([wanted("cats", (A,)), wanted("both", count=2)])
    machine.gone = set()
    assert [job.name for job in queue.start_due()] == ["cats"]


def test_jobs_without_gpu_run_one_at_a_time(queue: FakeLocal, machine: FakeMachine) -> None:
    machine.uuids = ()
    queue.submit([wanted("one", (CPU,)), wanted("two", (CPU,))])
    assert [job.name for job in queue.start_due()] == ["one"]
    assert queue.start_due() == []
    machine.live()[0].end(0)
    assert [job.name for job in queue.start_due()] == ["two"]


def test_gpus_that_vanish_start_nothing_on_the_cpu(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("any"), wanted("cats", (A,))])
    machine.gone = {A, B}
    assert queue.start_due() == []
    assert [one.note for one in overview(queue)] == [
        "wants 1 GPU, and 0 are there",
        "waits for GPU-a, which is not there",
    ]


def test_starts_are_told_by_plans_and_by_runs(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit(
        [wanted("cats", (A,), seconds=2400.0), wanted("dogs", (A,), seconds=60.0), wanted("more", (A,))]
    )
    queue.start_due()
    cats, dogs, more = overview(queue)
    assert cats.note == "preparing, then about 40 min of training"
    assert dogs.note == f"waits for GPU 0, held by cats (job 1), {cats.note}, starts in {dogs.due.words}"
    assert (dogs.due, more.due) == tuple(
        Due(seconds=one, at_the_earliest=True, gpus=("GPU-a",)) for one in (2400.0, 2460.0)
    )
    writer = StatusWriter(machine.live()[0].folder / jobfiles.RUNTIME)
    for phase in (Phase.LOAD, Phase.CACHE, Phase.FIRST_STEP):
        writer.beat(phase)
        assert overview(queue)[0].note == cats.note, phase
    writer.beat(Phase.TRAIN, step=10, total=100, median_step_seconds=20.0)
    cats, dogs, more = overview(queue)
    assert cats.note == "about 30 min left"
    assert dogs.note == "waits for GPU 0, held by cats (job 1), about 30 min left, starts in about 30 min"
    assert (dogs.due, more.due) == (
        Due(seconds=1800.0, gpus=("GPU-a",)),
        Due(seconds=1860.0, at_the_earliest=True, gpus=("GPU-a",)),
    )
    queue.stop("1")
    cats, dogs, more = overview(queue)
    assert cats.note == "saves, and ends", "the steps that are left are not trained"
    assert (dogs.note, dogs.due) == ("waits for GPU 0, held by cats (job 1)", None)


def test_a_run_without_a_known_time_prepares_all_the_same(queue: FakeLocal) -> None:
    queue.submit([wanted("cats", (A,)), wanted("dogs", (A,))])
    queue.start_due()
    cats, dogs = overview(queue)
    assert cats.note == "preparing"
    assert dogs.note == "waits for GPU 0, held by cats (job 1), preparing"
    queue.stop("1")
    assert overview(queue)[0].note == "saves, and ends"


def test_nobody_else_sees_the_queues_files(queue: FakeLocal) -> None:
    queue.submit([wanted("cats")])
    assert queue.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("kept", "opened", "refused"),
    [
        (Machine(id="m", boot="1"), Machine(id="m", boot="2"), False),  # it was started anew
        (Machine(id="m", boot="1"), Machine(id="n", boot="1"), False),  # a container with an id of its own
        (Machine(id="", boot="1"), Machine(id="", boot="1"), False),
        (Machine(id="m", boot="1"), Machine(id="n", boot="2"), True),
        (Machine(id="", boot="1"), Machine(id="", boot="2"), True),
        (Machine(id="", boot="1"), Machine(id="m", boot="2"), True),
    ],
)
def test_a_second_machine_is_refused_and_a_second_boot_is_not(
    queue: FakeLocal, machine: FakeMachine, kept: Machine, opened: Machine, refused: bool
) -> None:
    machine.identity = kept
    queue.submit([wanted("cats")])
    machine.identity = opened
    if refused:
        with pytest.raises(ConfigError, match="another machine's"):
            queue.start_due()
        assert machine.started == []
        return
    assert len(queue.start_due()) == 1
    machine.live()[0].end(0)


def test_a_machine_keeps_its_queue_over_boots_that_a_container_began(
    queue: FakeLocal, machine: FakeMachine
) -> None:
    for name, boot in (("", "1"), ("m", "1"), ("m", "2"), ("", "2")):  # a container once more
        machine.identity = Machine(id=name, boot=boot)
        queue.submit([wanted(f"run-{boot}{name}")])
    assert len(queue.jobs()) == 4


def test_a_file_that_cannot_be_used_is_told(queue: FakeLocal) -> None:
    queue.submit([wanted("cats")])
    path = queue.folder / database.DATABASE_FILE
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="newer trainer"):
        queue.start_due()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE jobs RENAME COLUMN seconds TO minutes")
    with pytest.raises(StorageError, match=r"a newer trainer wrote this queue \(version 99\)\n.*"):
        queue.jobs()  # its tables are not ours to judge: no disk has to be repaired
    path.write_bytes(b"no database, of a length that a header has" * 100)
    with pytest.raises(StorageError, match=r"cannot be used: .*\n *-> the file is damaged: move it away"):
        queue.start_due()
    with pytest.raises(StorageError, match="cannot be used"):
        queue.jobs()
    path.unlink()
    path.mkdir()  # no file that can be opened, for root neither
    with pytest.raises(StorageError, match=r"cannot be used: .*\n *-> let this user read and write"):
        queue.start_due()


def test_a_job_that_is_not_there_is_told(queue: FakeLocal) -> None:
    assert queue.jobs() == []  # of a queue that was never made
    assert not queue.folder.exists()
    for change in (queue.stop, queue.hold, queue.release, queue.forget, queue.state, queue.log):
        with pytest.raises(ConfigError, match="there is no job 7"):
            change("7")


def test_a_lost_database_takes_no_files_from_a_run_that_lives(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("cats", (A,))])
    queue.start_due()
    (run,) = machine.live()
    (run.folder / jobfiles.OUTPUT_FILE).write_text("step 1\n")
    (queue.folder / database.DATABASE_FILE).rename(queue.folder / "moved away")
    assert queue.submit([wanted("dogs", (B,))]) == ["2"]
    assert jobfiles.is_alive(run.folder)
    assert (run.folder / jobfiles.OUTPUT_FILE).read_text() == "step 1\n"


def test_jobs_move_together_in_their_order(queue: FakeLocal) -> None:
    queue.submit([wanted(name) for name in ("a1", "a2", "b", "c", "d")])
    for place, order in ((2, "b a1 a2 c d"), (3, "b c a1 a2 d"), (9, "b c d a1 a2"), (1, "a1 a2 b c d")):
        queue.move(["1", "2"], place)
        assert [job.name for job, _ in queue.jobs()] == order.split(), place


def test_no_job_is_put_before_one_that_runs(queue: FakeLocal, machine: FakeMachine) -> None:
    queue.submit([wanted("a", (A,)), wanted("b", (B,)), wanted("c", (A,)), wanted("d", (A,))])
    queue.hold("1")
    queue.start_due()  # b and c
    for job, place, order in (
        ("4", 1, "b c d a"),
        ("1", 1, "b c a d"),
        ("1", 9, "b c d a"),
        ("2", 9, "c b d a"),
    ):
        queue.move([job], place)
        assert [one.name for one, _ in queue.jobs()] == order.split(), (job, place)


def test_pictures_are_no_steps(queue: FakeLocal, machine: FakeMachine) -> None:
    """Steps of the run stay known while it saves and previews; a cache's pictures are none."""
    queue.submit([wanted("cats", (A,), seconds=7000.0)])
    queue.start_due()
    writer = StatusWriter(machine.live()[0].folder / jobfiles.RUNTIME)

    def shown() -> tuple[int | None, int | None, float | None]:
        (entry,) = overview(queue)
        return entry.step, entry.total, entry.seconds_left

    writer.beat(Phase.CACHE, step=37, total=200)
    assert shown() == (None, None, 7000.0)
    writer.beat(Phase.TRAIN, step=60, total=100, median_step_seconds=2.0)
    assert shown() == (60, 100, 80.0)
    writer.beat(Phase.PREVIEW)
    assert shown() == (60, 100, 80.0)
    writer.beat(Phase.SAVE, step=61)
    assert shown() == (61, 100, 78.0)


def test_the_number_of_a_forgotten_job_is_not_given_again(queue: FakeLocal) -> None:
    queue.submit([wanted("cats")])
    queue.forget("1")
    assert not (queue.folder / "jobs" / "1").exists()
    assert queue.submit([wanted("cats")]) == ["2"]


def test_the_environment_of_a_run(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs by UUID in slots' order; nothing that would change the configuration, or be another run's."""
    monkeypatch.setenv("TRAINER__TRAIN__SEED", "7")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("TRAINER_METRICS_PORT", "9464")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("TRAINER_WEBHOOK_FILE", "./my-hook")
    monkeypatch.setenv("TRAINER_CACHE_DIR", "~/cache")
    monkeypatch.chdir(tmp_path)  # runs have a working folder of their own
    found: list[dict[str, str]] = []

    class Recorded(Local):
        def launch(self, start: Start) -> None:
            found.append(self.environment_of(start))

    queue = Recorded(folder=tmp_path / "queue", gpus=machine.gpus)
    queue.submit([wanted("both", (B, A)), wanted("cpu", (CPU,))])
    queue.start_due()
    both, cpu = found
    assert (both["CUDA_DEVICE_ORDER"], both["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "GPU-b,GPU-a")
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert both["TRAINER_METRICS_PORT"] == "0"
    assert both["TRAINER_RUNTIME_DIR"] == str(tmp_path / "queue/jobs/1/runtime") != cpu["TRAINER_RUNTIME_DIR"]
    assert (both["HF_HOME"], both["TRAINER_QUEUE_JOB"]) == ("/models", "1")
    assert both["TRAINER_WEBHOOK_FILE"] == str(tmp_path / "my-hook")
    assert (both["TRAINER_CACHE_DIR"], "HF_HUB_CACHE" in both) == ("~/cache", False)
    assert not {"TRAINER__TRAIN__SEED", "RANK"} & set(both)


def test_locks_of_a_round_are_let_go_where_no_process_can_be_started(
    tmp_path: Path, machine: FakeMachine
) -> None:
    class Full(Local):
        def launch(self, start: Start) -> None:
            raise OSError("no more processes")

    queue = Full(folder=tmp_path / "queue", gpus=machine.gpus, machine=lambda: machine.identity)
    queue.submit([wanted("cats", (A,))])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="no more processes"):
        queue.start_due()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert queue.state("1").state is State.WAITING
    later = FakeLocal(queue.folder, machine)
    assert [job.id for job in later.start_due()] == [1]


@pytest.mark.parametrize("text", ["", "four", "-1", "٤"])
def test_a_damaged_number_of_pictures_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / jobfiles.PICTURES_FILE).write_text(text)
    with pytest.raises(StorageError, match="no number of pictures"):
        jobfiles.pictures(tmp_path)
