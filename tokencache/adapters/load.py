"""Finds and reads adapter files: those of the package and the user's own.

Each file describes one harness and has its name. A wheel contains the files inside the package; in a checkout they are next to the package.
A user's file replaces a shipped one of the same name.
"""

import functools
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

import tokencache
from tokencache.adapters.schema import Adapter

_PACKAGE = Path(tokencache.__file__).parent
_DIRECTORIES = (_PACKAGE / "harness_adapters", _PACKAGE.parent / "harness_adapters")


class AdapterError(Exception):
    """An adapter cannot be read or used. The message names the file or the harness, and what is wrong."""


def shipped() -> Path:
    """Return the directory of the shipped adapters. Raises `AdapterError` if this installation has none."""
    for directory in _DIRECTORIES:
        if directory.is_dir():
            return directory
    raise AdapterError(f"this installation has no adapters: neither {_DIRECTORIES[0]} nor {_DIRECTORIES[1]}")


def load_file(path: Path) -> Adapter:
    """Read one adapter.

    Raises:
        AdapterError: the file cannot be read, is not TOML, or the schema refuses it. The message names the file and the field.
    """
    try:
        return _read(path.stem, path.read_text(encoding="utf-8"))
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise AdapterError(f"{path}: {error}") from None


@functools.lru_cache(maxsize=64)  # adapters cannot be changed, and a process may start several proxies
def _read(name: str, text: str) -> Adapter:
    data = tomllib.loads(text)
    if "name" in data:
        raise ValueError("name: remove it, the name of the file is the name of the adapter")
    return msgspec.convert({**data, "name": name}, Adapter)


def load_all(own: Iterable[Path] = ()) -> dict[str, Adapter]:
    """Load all adapters, sorted by name. `own` are directories of the user; later ones take precedence.

    Raises:
        AdapterError: a directory is missing, or a file is wrong.
    """
    paths: dict[str, Path] = {}
    for directory in (shipped(), *own):
        if not directory.is_dir():
            raise AdapterError(f"{directory}: no such directory of adapters")
        paths |= {path.stem: path for path in directory.glob("*.toml")}
    return {name: load_file(paths[name]) for name in sorted(paths)}


def load(name: str, own: Iterable[Path] = ()) -> Adapter:
    """Load the adapter of one harness. Raises `AdapterError` if there is no adapter of this name, or a file is wrong."""
    adapters = load_all(own)
    if name not in adapters:
        raise AdapterError(f"no adapter {name!r}; there are {', '.join(adapters)} (your own: --adapters DIR)")
    return adapters[name]
