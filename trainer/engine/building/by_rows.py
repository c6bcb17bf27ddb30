"""The way through a model whose weights lie in rows: one that all ranks go together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from trainer.engine.context import Context
from trainer.families.family import Family
from trainer.modeling.storage.trained_rows import Root


def through(root: Root, context: Context) -> Context:
    """The context whose family passes through the model inside of `root`, where weights are gathered."""
    return dataclasses.replace(context, family=_through(root, context.family))


def _through(root: Root, family: Family) -> Family:
    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(model: Any, *given: Any) -> Any:
            assert model is root.model, "the model in rows is the only one"
            return root.run(functools.partial(function, model, *given))

        return run

    changed: Mapping[str, Any] = {
        "predict": inside(family.predict),
        "own_loss": None if family.own_loss is None else inside(family.own_loss),
        "own_scores": None if family.own_scores is None else inside(family.own_scores),
        "preview": inside(family.preview),
    }
    return dataclasses.replace(family, **changed)
