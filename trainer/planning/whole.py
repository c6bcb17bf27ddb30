"""The whole plan of a command line or a page: what a run goes on with, its steps, data and metrics."""

from __future__ import annotations

from trainer.config.reading.load import Loaded
from trainer.machine.facts import Facts
from trainer.planning.data_rows import with_data
from trainer.planning.epochs import with_epochs
from trainer.planning.kept_decisions import continued
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.scoring_row import with_scoring


def whole_plan(loaded: Loaded, facts: Facts, requested_profile: str = "auto") -> tuple[Loaded, Plan]:
    """The configuration as it is planned, and its plan: what `trainer plan` shows.

    A run that has begun keeps its decisions, and a length in epochs is one in steps. Raises as `plan_run`.
    """
    loaded = with_epochs(continued(loaded))
    plan = plan_run(loaded, facts, requested_profile)
    return loaded, with_scoring(with_data(plan, loaded.config), loaded)
