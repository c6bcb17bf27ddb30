"""Libraries' notices that nobody can act on are not shown; everything else is."""

from __future__ import annotations

import logging
import re
import subprocess
import warnings

import pytest

from trainer.config import environment
from trainer.config.interpreter import python
from trainer.modeling import quiet

SAID = {
    "`torch": ("`torch.jit.script_method` is deprecated. Please switch", "torch.jit._script"),
    "": ('"is" with a literal', "/site-packages/torchao/quantization/quant_api"),
    "invalid": ("invalid escape sequence", "/site-packages/torchao/quantization/quant_api"),
    "(Failed": ("Failed to load /x/torchao/_C.so: Could not load this library", "torchao"),
    "<enum": ("<enum 'KernelPreference'> is an Enum subclass and is now", "torch.utils._pytree"),
    "Failed": (
        "Failed to load CPU gemm_4bit_forward from kernels-community",
        "bitsandbytes.backends.cpu.ops",
    ),
    "Torchinductor": (
        "Torchinductor does not support code generation for complex operators. Performance",
        "torch._inductor.lowering",
    ),
    "FSDP2-wrapped": (
        "FSDP2-wrapped module (FSDPBlock) returned a view tensor. An in-place op",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
    ),
    "Mismatch": ("Mismatch dtype between input and weight: input dtype = float", "torch.nn.functional"),
    r"torch": ("torch._dynamo hit config.recompile_limit (16)", "torch._dynamo.convert_frame"),
}
"""Messages of libraries and their source, by the first word of a row's pattern."""


@pytest.mark.parametrize("row", quiet.NOTICES, ids=lambda row: row.says or row.module)
def test_a_notice_is_not_shown_and_what_is_like_it_is(
    row: quiet.Unheard, caplog: pytest.LogCaptureFixture
) -> None:
    text, place = SAID[re.split(r"[\\ ]", row.says)[0]]
    assert row.reason
    quiet.quiet_libraries()  # imports come first: what they say is not asked here
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet.quiet_libraries()
        if row.category is not None:
            warnings.warn_explicit(text, row.category, "x.py", 1, module=place)
            assert not shown
            warnings.warn_explicit(text, row.category, "x.py", 1, module="trainer.engine.run")
            assert [str(one.message) for one in shown] == [text]
            return
    with caplog.at_level(logging.WARNING):
        logging.getLogger(row.logger).warning("%s", text)
        assert not caplog.records
        logging.getLogger(row.logger).warning("it works otherwise")
        logging.getLogger("trainer.run").warning("%s", text)
    assert [record.getMessage() for record in caplog.records] == ["it works otherwise", text]


@pytest.mark.slow
def test_what_a_run_imports_says_nothing() -> None:
    program = """
from trainer.modeling.quiet import quiet_libraries
quiet_libraries()
import accelerate, peft
from diffusers import FluxPipeline, QwenImagePipeline
from transformers import AutoTokenizer, T5EncoderModel, Qwen2_5_VLForConditionalGeneration
import importlib.util
if importlib.util.find_spec("bitsandbytes"):
    import bitsandbytes
"""
    variables = {**environment.snapshot(), "PYTHONWARNINGS": "default"}
    done = subprocess.run(python("-c", program), env=variables, capture_output=True, text=True, check=True)
    assert done.stderr == ""
