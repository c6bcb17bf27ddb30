"""Install commands of the project's optional parts, in the same words wherever one is missing.

Never `pip install 'trainer[...]'`: the package index has another project of that name.
"""

from __future__ import annotations

IN_IMAGES = ("nf4", "flash-attn-4")
"""Extras of pyproject.toml that images for GPUs have by default: EXTRAS of docker/Dockerfile."""


def command(extra: str = "") -> str:
    """The command that installs an extra, or without one all required packages, run in a checkout."""
    if extra == "flash-attn":  # its setup asks the torch that is installed, and packages that this brings
        return "pip install --no-build-isolation -c constraints.txt -e '.[flash-attn]'"
    checkout = f"'.[{extra}]'" if extra else "."
    return f"pip install -c constraints.txt -e {checkout}"


def remedy(extra: str = "") -> str:
    """The remedy where a package of an extra is missing, in a checkout and in a container."""
    if extra == "flash-attn":
        build = "--build-arg KERNELS=build"
    elif extra:
        build = f'--build-arg EXTRAS="{" ".join(dict.fromkeys((*IN_IMAGES, extra)))}"'
    else:
        return f"in a checkout: {command()}"
    return f"in a checkout: {command(extra)}; as a container: an image for GPUs built with {build}"
