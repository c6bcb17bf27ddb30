"""Entries of a dataset_info.json, in which other trainers describe data sets: a file, its columns and tags.

Read as documented there: with `columns` only the named ones count, tags that are left out keep their
defaults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data.caption_text import TextError, decode_text, object_of_pairs
from trainer.data.conversations.formats import Layout, Tags, layout_of_columns
from trainer.errors import DataError
from trainer.words.near import did_you_mean

_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
# keys that would change what is trained on, and the values with which they change nothing
_UNREAD: Mapping[str, tuple[object, ...]] = {
    "ranking": (None, False),
    "split": (None, "train"),
    "subset": (None,),
    "folder": (None,),
    "num_samples": (None,),
    "revision": (None,),
}
_KNOWN = ("file_name", "file_sha1", "formatting", "columns", "tags", *_ELSEWHERE, *_UNREAD)
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "alpaca": ("prompt", "query", "response", "history", "system"),
    "sharegpt": ("messages", "system"),
}
_USUAL: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""Columns of an entry without `columns`."""
_NO_TEXT = ("images", "videos", "audios", "tools", "chosen", "rejected", "kto_tag")
"""Columns that are known there, and no misspelt ones of these."""
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}


def read_entry(path: Path, name: str) -> tuple[Path, Layout]:
    """The data file of an entry, and the layout of its records. Raises DataError."""
    where = f"{path}: {name}"
    entry = _entry(path, name)
    try:
        _refuse_unread(entry)
        formatting = entry.get("formatting") or "alpaca"
        if not isinstance(formatting, str) or formatting not in _COLUMNS:
            remedy = "write alpaca, or sharegpt, with `tags` for other names of keys and roles"
            raise TextError(f"formatting {formatting!r} is not read", remedy)
        columns = _map(entry, "columns", _COLUMNS[formatting]) or _USUAL[formatting]
        tags = _map(entry, "tags", tuple(_TAGS))
        if tags and formatting != "sharegpt":
            raise TextError(
                "`tags` are of messages, which alpaca has none of", "remove them, or the formatting"
            )
        return _data_file(path.parent, entry.get("file_name")), _layout(
            formatting, columns, {**_TAGS, **tags}
        )
    except TextError as error:
        raise DataError(error.what, where=where, remedy=error.remedy) from error


def _entry(path: Path, name: str) -> Mapping[str, Any]:
    """The entry of this name."""
    try:
        found = json.loads(decode_text(path.read_bytes()), object_pairs_hook=object_of_pairs)
    except OSError as error:
        what, remedy = f"the file cannot be read: {error.strerror or error}", "correct `dataset_info`"
        raise DataError(what, where=str(path), remedy=remedy) from error
    except TextError as error:
        raise DataError(error.what, where=str(path), remedy=error.remedy) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}", where=str(path), remedy="correct it") from error
    if not isinstance(found, dict):
        what, remedy = (
            "the file is not a JSON object of data sets",
            'write {"my_set": {"file_name": "a.json"}}',
        )
        raise DataError(what, where=str(path), remedy=remedy)
    if name not in found:
        remedy = f"{did_you_mean(name, list(found))}it has {', '.join(found) or 'none'}"
        raise DataError(f"there is no data set {name!r}", where=str(path), remedy=remedy)
    if not isinstance(found[name], dict):
        remedy = 'write {"file_name": "a.json"}'
        raise DataError("the entry is not a JSON object", where=f"{path}: {name}", remedy=remedy)
    entry: Mapping[str, Any] = found[name]
    return entry


def _refuse_unread(entry: Mapping[str, Any]) -> None:
    """Raise TextError for an entry that asks for anything beyond a file beside it."""
    for key in _ELSEWHERE:
        if entry.get(key) is not None:
            what = f"`{key}: {entry[key]}` is not beside the file, and data sets are not downloaded"
            raise TextError(what, f"download it as .json, .jsonl or .parquet, and write file_name for {key}")
    for key, value in entry.items():
        if key in _UNREAD and value not in _UNREAD[key]:
            raise TextError(f"`{key}` is not read", "remove it; make a file of the records that are meant")
        if key not in _KNOWN:
            remedy = f"{did_you_mean(key, _KNOWN)}known are {', '.join(_KNOWN)}"
            raise TextError(f"unknown key `{key}`", remedy)


def _map(entry: Mapping[str, Any], key: str, known: tuple[str, ...]) -> Mapping[str, str]:
    """Names of columns or tags; none of those that are null."""
    found = entry.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise TextError(f"`{key}` is not a JSON object", f"its keys are {', '.join(known)}")
    named = {name: value for name, value in found.items() if value is not None}
    for name, value in named.items():
        if name not in known:
            near = "" if name in _NO_TEXT else did_you_mean(name, known)
            remedy = f"{near}{', '.join(known)} are; only text is learned"
            raise TextError(f"`{key}.{name}` is not read", remedy)
        if not isinstance(value, str) or not value.strip():
            raise TextError(f"`{key}.{name}` is not a name", "write the name as a text")
    needed = " and ".join(one for one in ("messages", "prompt", "response") if one in known)
    if key == "columns" and not set(needed.split(" and ")) <= named.keys():
        raise TextError(f"`columns` lacks a name: {needed} are needed", "add it, or remove `columns`")
    return named


def _layout(formatting: str, columns: Mapping[str, str], tags: Mapping[str, str]) -> Layout:
    """The layout of records with these columns and tags."""
    roles = {tags["system_tag"]: "system", tags["user_tag"]: "user", tags["assistant_tag"]: "assistant"}
    if len(roles) < 3:
        raise TextError("`tags` give one word to two roles", "write a word for each")
    one = Tags(role=tags["role_tag"], content=tags["content_tag"], roles=roles)
    return layout_of_columns(columns, (one,) if formatting == "sharegpt" else ())


def _data_file(folder: Path, name: object) -> Path:
    """The data file, which lies below `folder`."""
    if not isinstance(name, str) or not name.strip():
        raise TextError("`file_name` is missing", "add the name of a file beside dataset_info.json")
    # a null byte is in no path
    if "\0" in name or not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder)):
        what = f"`file_name: {name}` leads out of the folder {folder}"
        raise TextError(what, "put the file into that folder, and name it from there")
    file = folder / name
    if file.is_dir():
        raise TextError(f"`file_name: {name}` is a folder", "make an entry, and a set, for each of its files")
    if not file.is_file():
        raise TextError(f"`file_name: {name}` does not exist in {folder}", "correct `file_name`")
    return file
