"""The place of this process's host in a job that several do, and its end where another one is lost."""

from __future__ import annotations

import logging
import os
import sys

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.config.secrets import shown
from trainer.engine.hosts.introduction import introduction
from trainer.engine.meeting.lifeline import GO_ON
from trainer.engine.meeting.meeting import Meeting, announce
from trainer.engine.spec import Spec
from trainer.errors import LostError, TrainerError
from trainer.modeling.base.source import ModelSource
from trainer.planning.plan import Plan
from trainer.telemetry.run_folder import process


def meeting_of(config: RunConfig, plan: Plan, source: ModelSource, spec: Spec) -> Meeting | None:
    """Where the hosts of a job meet, and what this one says of itself; None for one host."""
    if spec.hosts == 1:
        return None
    return Meeting(
        hosts=spec.hosts,
        host=spec.host,
        address=spec.master,
        port=spec.port,
        introduction=introduction(config, plan, source, spec.hosts),
        tell=tell,
    )


def announce_end(spec: Spec, error: TrainerError) -> None:
    """Tell other hosts of an error that came before they met, if this process speaks for its host."""
    rank, _ = environment.rank_and_ranks()
    if spec.hosts > 1 and rank == spec.first_rank:
        meeting = Meeting(
            hosts=spec.hosts,
            host=spec.host,
            address=spec.master,
            port=spec.port,
            introduction={},
            tell=tell,
        )
        announce(meeting, f"{error.problems[0].what} (exit code {int(error.exit_code)})")


def tell(text: str) -> None:
    """Print a line for the people at this host, whichever it is; the run's log is rank 0's."""
    rank, _ = environment.rank_and_ranks()
    if rank == 0:
        logging.getLogger("trainer.run").info("%s", text)
    else:
        print(shown(f"rank {rank}: {text}"), file=sys.stderr, flush=True)


def end_lost(spec: Spec, text: str) -> None:
    """End this process at once, from whatever thread: the main one may wait for the host that is lost."""
    rank, _ = environment.rank_and_ranks()
    error = LostError(text, remedy=GO_ON)
    process.write_error(spec.status_folder(rank), error)
    logging.getLogger("trainer.run").error("%s", error, extra={"fields": {"exit_code": error.exit_code}})
    os._exit(error.exit_code)
