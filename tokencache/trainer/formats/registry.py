"""All formats, in one table: `?format=` and `tokencache export --format` look here."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tokencache.errors import HarnessError
from tokencache.trainer.formats.native import native
from tokencache.trainer.rollout import Rollout


class Format(NamedTuple):
    """A format: its name, who reads it, and the function that writes a rollout as JSON values.

    `rows` names the member of what it writes that holds one row for each training sample; `""` where all of it is one.
    `reads_contexts` says that it needs the messages beside the tokens.
    """

    name: str
    title: str
    write: Callable[[Rollout], dict[str, Any]]
    rows: str
    reads_contexts: bool = False


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (Format("native", "tokencache's own: everything that is known", native, "sequences"),)
}


def format_named(name: str) -> Format:
    """Find a format.

    Raises:
        HarnessError: there is none of this name; the message lists those that exist.
    """
    if name not in FORMATS:
        raise HarnessError(f"format {name[:80]!r} is not one of: {', '.join(FORMATS)}", param="format")
    return FORMATS[name]
