"""Writes FILE.manifest.json beside an export: what somebody needs to trust the file, or to make it again.

It says which file it belongs to (its SHA-256), what was exported and what was left out, and under which conditions the proxy recorded at
the time of the export. It contains no text and no tokens.
"""

import hashlib
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tokencache import __version__
from tokencache.client import Conditions
from tokencache.commands.sink import MANIFEST, write_whole

VERSION = 1
"""Of the manifest's form. A later version may add members."""


def write(path: Path, conditions: Conditions | None, contents: Mapping[str, Any]) -> None:
    """Write the manifest of a file that is complete, beside it. `conditions` is `None` if the proxy is older than that route.

    Raises:
        OSError: the file cannot be read, or the manifest cannot be written.
    """
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    found = {
        "manifest": VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": {"name": path.name, "bytes": path.stat().st_size, "sha256": digest},
        "exporter": {"tokencache": __version__, "python": platform.python_version()},
        **contents,
        "proxy": conditions,
    }
    write_whole(path.with_name(path.name + MANIFEST), msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def add_up(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers to those of the same name, also within members."""
    for name, value in more.items():
        if isinstance(value, dict):
            add_up(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
