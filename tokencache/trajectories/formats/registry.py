"""All formats, in one table: `?format=` and `tokencache export --format` look here."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tokencache.errors import HarnessError
from tokencache.trajectories.formats.atif import atif
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.formats.nemo_gym import nemo_gym
from tokencache.trajectories.formats.skyrl import skyrl
from tokencache.trajectories.formats.slime import slime
from tokencache.trajectories.formats.tinker import tinker
from tokencache.trajectories.formats.trl import trl
from tokencache.trajectories.formats.verifiers import verifiers
from tokencache.trajectories.formats.verl import verl
from tokencache.trajectories.rollout import Rollout


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
    for one in (
        Format("native", "tokencache's own: everything that is known", native, "sequences"),
        Format("verl", "verl: AgentLoopOutput", verl, "outputs"),
        Format("slime", "slime: Sample", slime, "samples", reads_contexts=True),
        Format("miles", "miles: Sample", slime, "samples", reads_contexts=True),
        Format("skyrl", "SkyRL: GeneratorOutput, a batch of all sequences", skyrl, ""),
        Format("trl", "TRL: what a rollout_func returns, by row", trl, "rows"),
        Format("tinker", "Tinker: Datum, less the advantages", tinker, "data"),
        Format("nemo-gym", "NeMo Gym: results with token ids, for NeMo RL", nemo_gym, "responses", reads_contexts=True),
        Format("verifiers", "verifiers: Trace, a branch for each sequence", verifiers, "", reads_contexts=True),
        Format("prime-rl", "prime-rl: trains on verifiers' Trace", verifiers, "", reads_contexts=True),
        Format("atif", "Harbor: Agent Trajectory Interchange Format", atif, "trajectories", reads_contexts=True),
    )
}


def format_named(name: str) -> Format:
    """Find a format.

    Raises:
        HarnessError: there is none of this name; the message lists those that exist.
    """
    if name not in FORMATS:
        raise HarnessError(f"format {name[:80]!r} is not one of: {', '.join(FORMATS)}", param="format")
    return FORMATS[name]
