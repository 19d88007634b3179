"""Reads a reward from a file, for `tokencache finish`, `reward` and `run`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

RewardFileOption = Annotated[
    Path | None,
    typer.Option(
        "--reward-file",
        metavar="FILE",
        help='File with the reward: a JSON number, or {"reward": 0.5, "components": {...}, "turns": {...}, "sequences": {...}}.',
    ),
]


class RewardFileError(Exception):
    """The file holds no reward. The message names the file and says what is wrong."""


class RewardValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reward as a user writes it: of the whole session, of named components, of turns and of sequences by id."""

    reward: float | None = None
    components: dict[str, float] = {}
    turns: dict[str, float] = {}
    sequences: dict[str, float] = {}


_FORM = 'a number, or {"reward": NUMBER, "components"?: {NAME: NUMBER}, "turns"?: {TURN: NUMBER}, "sequences"?: {SEQUENCE: NUMBER}}'

FileVersion = tuple[int, int, int]
"""What is different once a file was written again."""


def version_of(path: Path) -> FileVersion | None:
    """Return the version of a file; `None` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_reward(path: Path, old: FileVersion | None = None) -> RewardValues:
    """Read a reward from a JSON file. `old` is a version of it that belongs to another rollout.

    Raises:
        RewardFileError: the file is old, it cannot be read, or it holds something else. JSON has no NaN and no infinity.
    """
    if old is not None and version_of(path) == old:
        raise RewardFileError(f"{path} is from before the run: the harness wrote no reward")
    try:
        value = msgspec.json.decode(path.read_bytes(), type=float | RewardValues)
    except OSError as error:
        raise RewardFileError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise RewardFileError(f"{path}: expected {_FORM}: {error}") from None
    return value if isinstance(value, RewardValues) else RewardValues(value)
