"""Rows of an Arrow table as Python's values: times as numbers, and bytes where a text is no UTF-8."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


def table_rows(table: Any) -> Sequence[object]:
    """The rows of a `pyarrow.Table` as dicts. A row with a text that is no UTF-8 is that text's bytes.

    Raises pyarrow's errors, which are kinds of ValueError.
    """
    try:
        listed: Sequence[object] = table.to_pylist()
    except (ValueError, OverflowError):
        # nanoseconds, years beyond 9999, time zones that this machine does not know, texts that are no UTF-8
        timeless = _without_times(table)
        return [_row(timeless.slice(number, 1)) for number in range(timeless.num_rows)]
    return listed


def _without_times(table: Any) -> Any:
    """The table with numbers in place of dates and times, which no conversation is made of."""
    pa: Any = importlib.import_module("pyarrow")
    return table.cast(pa.schema([field.with_type(_timeless(pa, field.type)) for field in table.schema]))


def _row(one: Any) -> object:
    try:
        return one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return error.object


def _timeless(pa: Any, kind: Any) -> Any:
    """An Arrow type with integers in place of dates, times and durations, within lists and structs too."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_timeless(pa, field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(_timeless(pa, kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int64() if kind.bit_width == 64 else pa.int32()
    # a field of nulls alone, which pyarrow does not cast within lists
    return pa.string() if pa.types.is_null(kind) else kind
