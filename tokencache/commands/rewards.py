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


def read_reward(path: Path) -> RewardValues:
    """Read a reward from a JSON file.

    Raises:
        RewardFileError: the file cannot be read, or it holds something else. JSON has no NaN and no infinity.
    """
    try:
        value = msgspec.json.decode(path.read_bytes(), type=float | RewardValues)
    except OSError as error:
        raise RewardFileError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise RewardFileError(f"{path}: expected {_FORM}: {error}") from None
    return value if isinstance(value, RewardValues) else RewardValues(value)
