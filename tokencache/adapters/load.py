"""Finds adapters: those that come with the package, and the user's own.

One file, one harness, its name the file's. In a wheel the files lie within the package, in a checkout beside it, so that
who reads the repository finds them; both are looked for. A user's file with the name of a shipped one takes its place.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

import tokencache
from tokencache.adapters.schema import Adapter

_PACKAGE = Path(tokencache.__file__).parent
_PLACES = (_PACKAGE / "harness_adapters", _PACKAGE.parent / "harness_adapters")


class AdapterError(Exception):
    """An adapter cannot be read or used; the message names the file, or the harness, and what is wrong."""


def shipped() -> Path:
    """Return the directory of the adapters that come with the package.

    Raises:
        AdapterError: the installation has none.
    """
    for place in _PLACES:
        if place.is_dir():
            return place
    raise AdapterError(f"this installation has no adapters: neither {_PLACES[0]} nor {_PLACES[1]}")


def load_file(path: Path) -> Adapter:
    """Read one adapter.

    Raises:
        AdapterError: it cannot be read, is no TOML, or holds what the schema refuses; names the file and the field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as why:
        raise AdapterError(f"{path}: {why}") from None
    if "name" in data:
        raise AdapterError(f"{path}: name: is not written within, it is the file's")
    try:
        return msgspec.convert({**data, "name": path.stem}, Adapter)
    except msgspec.ValidationError as why:
        raise AdapterError(f"{path}: {why}") from None


def load_all(own: Iterable[Path] = ()) -> dict[str, Adapter]:
    """Load all adapters by name, in order of their names; `own` are directories of the user, the later ones first in rank.

    Raises:
        AdapterError: a directory is missing, or one of the files is not right.
    """
    paths: dict[str, Path] = {}
    for directory in (shipped(), *own):
        if not directory.is_dir():
            raise AdapterError(f"{directory}: no such directory of adapters")
        paths |= {path.stem: path for path in directory.glob("*.toml")}
    return {name: load_file(paths[name]) for name in sorted(paths)}


def load(name: str, own: Iterable[Path] = ()) -> Adapter:
    """Load the adapter of one harness.

    Raises:
        AdapterError: there is none of this name, or some file is not right.
    """
    adapters = load_all(own)
    if name not in adapters:
        raise AdapterError(f"no adapter {name!r}; there are {', '.join(adapters)} (own ones: --adapters DIR)")
    return adapters[name]
