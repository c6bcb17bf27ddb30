"""Keys of kernel verdicts: the attention and the typical linear layer of a run."""

from __future__ import annotations

from trainer.families.values import AttentionShape


def shape_class(shape: AttentionShape) -> str:
    """Key of an attention verdict: verdicts are measured at the run's own shape."""
    shared = f"/{shape.key_heads}" if key_heads(shape) < shape.heads else ""
    causal = f" causal of {shape.samples}" if shape.causal else ""
    return f"b{shape.batch_size} h{shape.heads}{shared} d{shape.head_width} n{shape.tokens}{causal}"


def matmul_shape(shape: AttentionShape) -> tuple[int, int, int]:
    """(tokens, out, in) of the run's typical linear layer: the queries, keys and values of its attention."""
    heads = shape.heads + 2 * key_heads(shape)
    return shape.batch_size * shape.tokens, heads * shape.head_width, shape.heads * shape.head_width


def matmul_shape_class(shape: AttentionShape) -> str:
    """Key of a matmul verdict."""
    tokens, rows, columns = matmul_shape(shape)
    return f"m{tokens} n{rows} k{columns}"


def key_heads(shape: AttentionShape) -> int:
    """Heads of keys and values."""
    return shape.key_heads or shape.heads
