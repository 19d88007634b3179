"""Checking targets: what `verify` finds in a file, or in a session of a proxy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tokencache.client import Client, Trajectory
from tokencache.commands import files
from tokencache.trajectories.verify import CheckFailure, holes, verify

_ENDINGS = (files.JSONL, files.GZIP, files.PARQUET, files.JSON, files.PART)


class Checked(msgspec.Struct, kw_only=True):
    """What was found; `incomplete` are rollouts that say themselves that something is missing, and by which incidents."""

    target: str
    rollouts: int = 0
    turns: int = 0
    trainable_tokens: int = 0
    incomplete: dict[str, list[str]] = {}
    breaks: list[CheckFailure] = []


def check(target: str, client: Client) -> Checked:
    """Check a file, if the name is one's, or else the session of that name.

    Raises:
        FileError: the file cannot be read.
        ClientError: there is no such session, or nobody answers.
    """
    if target.endswith(_ENDINGS) or Path(target).is_file():
        return _checked(target, files.read(Path(target)))
    return _checked(target, [(1, msgspec.json.decode(client.session(target).fetch_json(drift="off")))])


def _checked(target: str, rollouts: Iterable[tuple[int, Any]]) -> Checked:
    found = Checked(target=target)
    places: dict[str, int] = {}
    for place, told in rollouts:
        try:
            rollout = msgspec.convert(told, Trajectory)
        except msgspec.ValidationError as why:
            name = str(told.get("session", "")) if isinstance(told, dict) else ""
            found.breaks.append(CheckFailure(session=name, check="readable", words=f"number {place} is no native rollout: {why}"))
            continue
        found.rollouts += 1
        found.turns += sum(len(sequence.turns) for sequence in rollout.sequences)
        found.trainable_tokens += sum(sum(sequence.loss_mask) for sequence in rollout.sequences)
        first = places.setdefault(rollout.session, place)
        if first != place:
            found.breaks.append(
                CheckFailure(session=rollout.session, check="once", words=f"is there twice: number {first} and number {place}")
            )
        found.breaks += verify(rollout)
        if not rollout.complete:
            found.incomplete[rollout.session] = list(holes(rollout))
    if not found.rollouts and not found.breaks:
        found.breaks.append(CheckFailure(session="", check="readable", words="there is no rollout in it"))
    return found
