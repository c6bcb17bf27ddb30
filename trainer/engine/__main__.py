"""The process that trains: `python -m trainer.engine SPEC.json`, started and watched by `trainer`.

The data set is checked before torch is imported, so that a bad one is told within a second.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.config.tree import placing
from trainer.data.leftout import report_left_out
from trainer.engine.caching.samples import Samples, scan_samples
from trainer.engine.spec import Spec, read_spec
from trainer.errors import (
    ConfigError,
    EndedTogether,
    ExitCode,
    PeerLostError,
    Problem,
    TrainerError,
    starts_told,
)
from trainer.families import components, get
from trainer.files import codec
from trainer.planning.plan import Plan
from trainer.telemetry import control, locks, log
from trainer.telemetry.progress import bars, silence
from trainer.telemetry.run_folder import process
from trainer.telemetry.rundir import LOCK_FILE, require_own_names
from trainer.telemetry.status import BUDGET_SECONDS, Phase, StatusWriter
from trainer.telemetry.stop import StopFlag, die_with_parent
from trainer.telemetry.streams import outlive_readers

if TYPE_CHECKING:
    from trainer.modeling.base.hub import Download
    from trainer.modeling.base.source import ModelSource

# a process that has lost its connections may take so long to give its memory back before it ends
_GONE_SECONDS = 30.0


def main(spec_path: str) -> int:
    """Run one job; returns the exit code. Errors of the user's making are logged, ours keep their
    traceback.
    """
    outlive_readers(stdout=True)
    stop = StopFlag()
    stop.install()
    spec, (rank, ranks) = read_spec(Path(spec_path)), environment.rank_and_ranks()
    if spec.mode in ("sample", "verify"):
        stop.remedy = "start the same command again: it begins anew"
    die_with_parent(spec.supervisor_pid)
    folder = spec.status_folder(rank)
    status = StatusWriter(folder, ranks=ranks // spec.hosts, first_rank=spec.first_rank)
    status.beat(Phase.LOAD)
    config = RunConfig.model_validate(spec.config)
    log.setup(None, rank)
    if rank:
        silence()
    logger = logging.getLogger("trainer.run")
    try:
        with placing(spec.sources), starts_told():
            if spec.mode == "train":
                _make_folder(config, spec, rank)
            samples = _scan(config, spec, status, stop) if spec.mode in ("train", "cache") else Samples()
            _work(config, spec, status, stop, samples)
    except TrainerError as error:
        if rank > spec.first_rank and _patience(
            spec
        ):  # mostly what the first one here finds and says as well
            status.wait_to_be_ended()
        return _tell(error, config, spec, rank)
    except PeerLostError as error:
        status.wait_to_be_ended(_patience(spec))
        logger.error("another rank of this run is gone: %s", error)
        return int(ExitCode.PEER_LOST)
    except EndedTogether as ended:
        if spec.host and isinstance(ended.__cause__, TrainerError):  # of that host nobody is here to end this
            return _tell(ended.__cause__, config, spec, rank)
        status.wait_to_be_ended(_patience(spec, saves=spec.hosts > 1))
        return int(ExitCode.PEER_LOST)
    finally:
        stop.uninstall()
    status.beat(Phase.DONE)
    _record_end(config, spec, ExitCode.OK, ())
    return int(ExitCode.OK)


def _make_folder(config: RunConfig, spec: Spec, rank: int) -> None:
    """Make the run's folder, and log there from now on, unless another run has it, whose log that is.

    Raises ConfigError where it cannot be written.
    """
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        require_own_names(config.output_dir)
        taken = rank == 0 and locks.is_held(config.output_dir / LOCK_FILE)
        log.setup(None if taken else config.output_dir, rank, host=spec.host)
    except OSError as error:
        raise ConfigError(
            f"the output folder cannot be written: {error.strerror}",
            where=str(config.output_dir),
            remedy="set output_dir, or --output, to a folder that this user may write",
        ) from error


def _tell(error: TrainerError, config: RunConfig, spec: Spec, rank: int) -> int:
    """Log an error, with previews that were asked for in vain, and leave it to the supervisor; gives its exit
    code.
    """
    if spec.mode == "train" and rank == 0:
        error = type(error)([*error.problems, *control.not_drawn(spec.status_folder(rank))])
    process.write_error(spec.status_folder(rank), error)
    fields = {"fields": {"exit_code": int(error.exit_code)}}
    logging.getLogger("trainer.run").error("%s", error, extra=fields)
    _record_end(config, spec, error.exit_code, error.problems)
    return int(error.exit_code)


def _record_end(config: RunConfig, spec: Spec, exit_code: ExitCode, problems: Sequence[Problem]) -> None:
    """Record how a run ended whose supervisor, which would do so, is gone."""
    supervisor = spec.supervisor_pid
    if spec.mode != "train" or supervisor in (None, os.getppid()) or environment.rank_and_ranks()[0]:
        return
    with contextlib.suppress(OSError, TrainerError):  # the exit code is worth more than its note
        process.end(
            config.output_dir, supervisor=supervisor, exit_code=exit_code, cause="", problems=problems
        )


def _patience(spec: Spec, *, saves: bool = False) -> float:
    """Seconds in which the supervisor ends a rank that has lost the others: none where it is gone itself.

    Where rank 0 `saves` on this host and others are on another one, it may take long, and needs nobody.
    """
    if spec.supervisor_pid not in (None, os.getppid()):
        return 0.0
    if saves:
        return BUDGET_SECONDS[Phase.SAVE]
    return _GONE_SECONDS


def _scan(config: RunConfig, spec: Spec, status: StatusWriter, stop: StopFlag) -> Samples:
    """Check the data set, with a bar for each folder, and list the files that are left out."""
    with bars() as advance:

        def on_image(what: str, done: int, total: int) -> None:
            stop.raise_if_requested()
            status.beat(Phase.LOAD, step=done, total=total)
            advance(what, done, total)

        samples = scan_samples(get(config.family), config, on_image)
    first = environment.rank_and_ranks()[0] == 0
    # the list of a run that has the folder is that one's
    own = spec.mode == "train" and first and not locks.is_held(config.output_dir / LOCK_FILE)
    report_left_out(samples.left_out, config.output_dir if own else None)
    return samples


def _work(config: RunConfig, spec: Spec, status: StatusWriter, stop: StopFlag, samples: Samples) -> None:
    """Everything that needs torch. On ranks but the first it raises EndedTogether once rank 0 has ended."""
    with _importing():
        from trainer.engine import run
        from trainer.engine.building.base_load_check import check_loadable
        from trainer.engine.context import Context
        from trainer.engine.hosts.place import end_now, meeting_of, tell
        from trainer.engine.ranks import is_lost_connection, joined
        from trainer.modeling.quiet import quiet_libraries
        from trainer.planning.out_of_memory import is_out_of_memory, out_of_memory
        from trainer.planning.planning import may_be_planned

        quiet_libraries()
    family, say = get(config.family), logging.getLogger("trainer.run").info
    source = _source(config, status, stop, say)
    with _importing():  # classes of the base model
        check_loadable(family, source)
    plan = codec.from_json(Plan, spec.plan_text, "plan.json")
    try:
        place = Path(spec.meeting_place)
        who, look = environment.rank_and_ranks(), stop.raise_if_requested
        meeting, on_end = meeting_of(config, plan, source, spec), functools.partial(end_now, spec)
        _mark(spec, spec.came_file)
        with joined(
            *who, place, status, device=plan.device, look=look, meeting=meeting, on_end=on_end
        ) as ranks:
            _mark(spec, spec.met_file)
            context = Context(
                config=config,
                plan=plan,
                family=family,
                source=source,
                cache_dir=Path(spec.cache_dir),
                status=status,
                stop=stop,
                say=say,
                ranks=ranks,
                tell=tell,
            )
            run.do(context, samples, spec)
            if spec.mode == "train" and ranks.speaks and not ranks.first:  # that host has said nothing so far
                tell("the run is finished; what it made is on host 0")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            if plan.in_rows and isinstance(error, RuntimeError) and is_lost_connection(error):
                raise PeerLostError(str(error)) from error
            raise
        allowed = functools.partial(may_be_planned, config, hosts=spec.machines)
        raise out_of_memory(error, status.phase, config, plan, allowed) from error


def _mark(spec: Spec, file: Path) -> None:
    """Make a file by which the supervisor of one of several hosts knows how far its first rank has come.

    It is not made in a folder that is gone, where no supervisor is left to read it.
    """
    if spec.hosts > 1 and environment.rank_and_ranks()[0] == spec.first_rank:
        with contextlib.suppress(OSError):
            file.touch()


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Imports a million objects that live as long as the process: no collection of garbage looks at them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _source(
    config: RunConfig, status: StatusWriter, stop: StopFlag, say: Callable[[str], None]
) -> ModelSource:
    """The base model; a download says its size first, beats while it runs and can be stopped."""
    from trainer.modeling.base.source import resolve_source, weights_line

    def on_start(download: Download) -> None:
        size, total = download.missing_bytes / 1e9, download.total_bytes / 1e9
        free = download.free_bytes / 1e9
        say(f"downloading {download.repository}: {size:.1f} of {total:.1f} GB, {free:.1f} GB free")

    def on_bytes(done: int, total: int) -> None:
        stop.raise_if_requested()
        status.beat(Phase.LOAD)

    family = get(config.family)
    wanted, trained = components(family), family.trained_component
    source = resolve_source(config, wanted, trained=trained, on_start=on_start, on_bytes=on_bytes)
    if source.random_components:
        say(f"weights: {weights_line(source, wanted)}")
    return source


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
