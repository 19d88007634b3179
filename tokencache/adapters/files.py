"""Writes the configuration files of a harness into a separate directory.

A directory with other content is refused, so that a user who names `~/.codex` by mistake loses nothing. A marker file identifies
directories that tokencache made.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tokencache.adapters.load import AdapterError

MARKER = ".tokencache"
"""The marker file."""

_LASTING = "/var/tmp"  # noqa: S108 - the directory made in it is new, and only the user can read it
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def temporary_directory(harness: str) -> tempfile.TemporaryDirectory[str]:
    """Make a directory that is removed after the harness ends, even if its last child processes still write to it.

    It is not under TMPDIR, where Codex 0.169 refuses to install its helper programs ("Refusing to create helper binaries under
    temporary dir").
    """
    parent = _LASTING if os.access(_LASTING, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix=f"tokencache-{harness}-", dir=parent, ignore_cleanup_errors=True)


def claim(directory: Path) -> None:
    """Make a configuration directory that only its owner can read, or accept one that tokencache made before.

    Raises:
        AdapterError: the directory has other content, or cannot be made.
    """
    marker = directory / MARKER
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not marker.exists() and any(directory.iterdir()):
            raise AdapterError(f"{directory} is not empty and was not made by tokencache: name an empty or a new directory")
        marker.write_text("A configuration directory of `tokencache run` or `tokencache env`.\n", encoding="utf-8")
    except OSError as error:
        raise AdapterError(f"{directory} cannot be used as configuration directory: {error}") from None


def write(directory: Path, files: Mapping[Path, str]) -> None:
    """Write files into a configuration directory. Only their owner can read them, because they contain keys.

    Raises:
        AdapterError: a file cannot be written.
    """
    claim(directory)
    try:
        for path, text in files.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AdapterError(f"{error.filename}: {error.strerror}") from None


def render(form: Literal["json", "toml", "yaml"], content: Mapping[str, Any]) -> str:
    """Return data as text in this format. YAML is written as JSON, which is YAML."""
    if form == "toml":
        return "\n".join(_toml(content, ())) + "\n"
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table: first its values, then its tables, as TOML requires."""
    for name, value in table.items():
        if not isinstance(value, dict):
            yield f"{_toml_key(name)} = {_toml_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            below = (*path, _toml_key(name))
            if not value or not all(isinstance(member, dict) for member in value.values()):
                yield f"\n[{'.'.join(below)}]"
            yield from _toml(value, below)


def _toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml_string(name)


def _toml_string(text: str) -> str:
    """Write a basic string. TOML has the escapes of JSON, and also requires that DEL is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    match value:
        case str():
            return _toml_string(value)
        case list():
            return f"[{', '.join(map(_toml_value, value))}]"
        case dict():
            return f"{{ {', '.join(f'{_toml_key(name)} = {_toml_value(member)}' for name, member in value.items())} }}"
        case _:
            return json.dumps(value)
