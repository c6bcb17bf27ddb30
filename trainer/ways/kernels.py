"""Attention kernels: one row each, read by planning, the probe, predicted times and the models.

A new kernel is a row here, its call in `modeling.attention.kernels`, its word in `features.attention`, and a
place in the profiles' order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NOT_INSTALLED = "not installed"
"""The probe's reason where a kernel's package is missing: no failure that a plan needs to tell of."""
OWN_SLOT = "_native_cudnn"
"""diffusers' name of the function in whose place most kernels are put.

Its names are a closed list, its flash function takes no padding, and those of the flash-attn packages check
or download things at run time. Our function takes the place of its cuDNN function: the one that was set last.
"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention."""

    name: str
    """The kernel's word in `features.attention`."""
    backend: str = OWN_SLOT
    """Name of diffusers' attention backend by which it is set."""
    package: str = ""
    """Distribution that holds the kernel, and its module; torch holds it where they are empty."""
    module: str = ""
    extra: str = ""
    """The project's extra that installs it."""
    build: str = ""
    """The way to install it, where it is in no extra."""
    on_cpu: bool = False
    least_capability: tuple[int, int] = (8, 0)
    only_capability: tuple[int, int] | None = None
    """The compute capability that it was written for, where it is a single one."""
    half: bool = True
    """Whether the kernel takes bf16 and fp16 only."""
    measured: bool = True
    """Whether the probe measures it, so that `auto` may choose it; else only a user names it."""
    safe: bool = False
    """Whether `auto` takes it unmeasured: some cuDNN versions crash in backward, and
    flash-attn's packages are built in many ways."""
    reads_ends: bool = False
    """Whether the kernel reads on the device where the samples of a packed row end."""
    takes_mask: bool = False
    """Whether a mask leaves padding out."""
    exact_only: bool = False
    """Whether the kernel must be given captions without padding."""
    peak_share: float = 0.0
    """Share of the tensor cores' peak that it reaches; 0: as `Rates.flash`."""


_ANYWHERE = Kernel(
    name="native", backend="native", least_capability=(0, 0), half=False, safe=True, takes_mask=True
)
# peak shares on an H200, forward and backward: cuDNN 507 of 989 TFLOP/s, the others by the probe's times
_CUDNN = Kernel(name="cudnn", peak_share=0.513)
# counted as cuDNN until it is measured, which it is before it is chosen
_FLASH_ATTN_2 = replace(
    _CUDNN,
    name="flash_attn_2",
    package="flash-attn",
    module="flash_attn",
    extra="flash-attn",
    exact_only=True,
)
_ROWS = (
    replace(_ANYWHERE, on_cpu=True, measured=False),
    replace(_CUDNN, name="cudnn_strided"),
    _CUDNN,
    Kernel(name="flash", safe=True, reads_ends=True),
    _FLASH_ATTN_2,
    replace(
        _FLASH_ATTN_2,
        name="flash_attn_3",
        package="flash-attn-3",
        module="flash_attn_interface",
        build="build it from the folder hopper of flash-attn's repository",
        only_capability=(9, 0),
    ),
    replace(
        _FLASH_ATTN_2,
        name="flash_attn_4",
        package="flash-attn-4",
        module="flash_attn.cute",
        extra="flash-attn-4",
        exact_only=False,
        reads_ends=True,
    ),
    replace(_ANYWHERE, name="efficient", backend="_native_efficient", peak_share=0.137),
    replace(_ANYWHERE, name="math", backend="_native_math", on_cpu=True, peak_share=0.035),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ROWS}
"""All rows by name, in the order in which the probe measures them."""
