"""The place of this process's host in a job that several do, and its end where another one is lost."""

from __future__ import annotations

import logging
import os
import sys

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.config.secrets import shown
from trainer.engine.hosts.introduction import introduction
from trainer.engine.meeting.meeting import Meeting
from trainer.engine.spec import Spec
from trainer.errors import TrainerError
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


def tell(text: str) -> None:
    """Print a line for the people at this host, whichever it is; the run's log is rank 0's."""
    rank, _ = environment.rank_and_ranks()
    if rank == 0:
        logging.getLogger("trainer.run").info("%s", text)
    else:
        print(shown(f"rank {rank}: {text}"), file=sys.stderr, flush=True)


def end_now(spec: Spec, error: TrainerError) -> None:
    """End this process at once, from whatever thread: the main one may wait for the host that is gone."""
    rank, _ = environment.rank_and_ranks()
    process.write_error(spec.status_folder(rank), error)
    logging.getLogger("trainer.run").error("%s", error, extra={"fields": {"exit_code": error.exit_code}})
    os._exit(error.exit_code)
