"""Notices of libraries that no user of ours can act on, each with the reason why it is not shown.

Rows are as narrow as they can be: other notices of a library are shown, and our own warnings always are.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from trainer.modeling.vision import make_torchvision_importable


@dataclass(frozen=True, kw_only=True)
class Unheard:
    """One notice that is not shown."""

    says: str
    """A regular expression that its text begins with."""
    reason: str
    category: type[Warning] | None = None
    """The class of a Python warning; None for a line of a log."""
    module: str = ""
    """A regular expression over the module that warns, or the file without its ending."""
    logger: str = ""
    """Name of the log."""


_TORCHAO = "an optional package that libraries import by themselves where it is there; nothing here uses it"
NOTICES: tuple[Unheard, ...] = (
    Unheard(
        category=DeprecationWarning,
        says=r"`torch\.jit\.script(_method)?` is deprecated",
        module=r"torch\.jit\._script",
        reason="transformers' own modules are compiled so as they are imported",
    ),
    Unheard(
        category=SyntaxWarning,
        says="",
        module=r".*[/\\]torchao[/\\]",
        reason=_TORCHAO,
    ),
    Unheard(
        category=DeprecationWarning,
        says="invalid escape sequence",
        module=r".*[/\\]torchao[/\\]",
        reason=f"before Python 3.12 a syntax warning has this category; {_TORCHAO}",
    ),
    Unheard(
        category=UserWarning,
        says=r"FSDP2-wrapped module \(\w+\) returned a view tensor",
        module=r"torch\.distributed\.fsdp\._fully_shard\._fsdp_state",
        reason="nothing writes in place to what a block returns",
    ),
    Unheard(logger="torchao", says=r"(Failed to load|Skipping import)", reason=_TORCHAO),
    Unheard(
        logger="torch.utils._pytree",
        says=r"<enum '\w+'> is an Enum subclass",
        reason=f"what torchao registers as it is imported; {_TORCHAO}",
    ),
    Unheard(
        logger="bitsandbytes.backends.cpu.ops",
        says="Failed to load CPU gemm_4bit_forward",
        reason="of a package that would be faster on some CPUs; nf4 works without it",
    ),
    Unheard(
        category=UserWarning,
        says="Torchinductor does not support code generation for complex operators",
        module=r"torch\._inductor\.lowering",
        reason="a rotation's angles are complex numbers that a compiled block only looks at as real ones",
    ),
    Unheard(
        category=UserWarning,
        says="Mismatch dtype between input and weight",
        module=r"torch\.nn\.functional",
        reason="a model that norms heads in float32 by bf16 weights, as its authors wrote it",
    ),
    Unheard(
        logger="torch._dynamo.convert_frame",
        says=r"torch\._dynamo hit config\.recompile_limit",
        reason="the run says itself how often blocks were compiled, and that further sizes run as written",
    ),
)


def quiet_libraries() -> None:
    """Keep the libraries' notices and bars out of the user's terminal; call it before they are imported."""
    make_torchvision_importable()
    for row in NOTICES:
        if row.category is not None:
            warnings.filterwarnings("ignore", message=row.says, category=row.category, module=row.module)
        else:
            logging.getLogger(row.logger).addFilter(_filter(row.says))
    from transformers.utils import logging as transformers_logging

    # before diffusers is imported: it makes transformers speak
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()


@functools.cache  # a logger takes one filter once
def _filter(says: str) -> Callable[[logging.LogRecord], bool]:
    unheard = re.compile(says)
    return lambda record: not unheard.match(record.getMessage())
