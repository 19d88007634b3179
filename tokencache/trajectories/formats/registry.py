"""The tables of all formats. `?format=` looks names up in `FORMATS`, `tokencache export --format` also in `TRACES`."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokencache.errors import HarnessError
from tokencache.trajectories.digest import add_digest
from tokencache.trajectories.formats.agentic_mooncake import agentic_mooncake
from tokencache.trajectories.formats.atif import atif, read_atif
from tokencache.trajectories.formats.native import native, native_with_text
from tokencache.trajectories.formats.nemo_gym import nemo_gym, read_nemo_gym
from tokencache.trajectories.formats.rows import ExportedRow
from tokencache.trajectories.formats.skyrl import read_skyrl, skyrl
from tokencache.trajectories.formats.slime import read_slime, slime
from tokencache.trajectories.formats.tinker import read_tinker, tinker
from tokencache.trajectories.formats.traces import Trace
from tokencache.trajectories.formats.trl import read_trl, trl
from tokencache.trajectories.formats.verifiers import read_verifiers, verifiers
from tokencache.trajectories.formats.verl import read_verl, verl
from tokencache.trajectories.formats.weka import weka
from tokencache.trajectories.lengths import Lengths
from tokencache.trajectories.limiting import limit, limit_lag, only_model, without_placeholders, without_training, without_untrained_models
from tokencache.trajectories.rollout import Records, Rollout, rollout
from tokencache.trajectories.versions import LagLimit

T = TypeVar("T")


class Format(NamedTuple):
    """An export format.

    Attributes:
        name: the value of `?format=`.
        title: which trainer reads it, and as what.
        write: writes a rollout as JSON values. A module-level function, because a worker process may call it.
        rows: the member of the written object that holds one row for each training sample; `""` if the whole object is one row.
        reads_contexts: whether the format needs the messages as well as the tokens.
        member: a member that only the rows of this format have, by which `tokencache verify` knows them.
        read: reads such a row back for `verify`; `None` if `verify` does not know the rows of this format, or for the native one.
    """

    name: str
    title: str
    write: Callable[[Rollout], dict[str, Any]]
    rows: str
    reads_contexts: bool = False
    member: str = ""
    read: Callable[[Mapping[str, Any]], list[ExportedRow]] | None = None


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("native", "tokencache's own: everything that is known", native, "sequences", reads_contexts=True, member="sequences"),
        Format("verl", "verl: AgentLoopOutput", verl, "outputs", member="response_ids", read=read_verl),
        Format("slime", "slime: Sample", slime, "samples", reads_contexts=True, member="rollout_log_probs", read=read_slime),
        Format("miles", "miles: Sample", slime, "samples", reads_contexts=True, member="rollout_log_probs", read=read_slime),
        Format("skyrl", "SkyRL: GeneratorOutput, a batch of all sequences", skyrl, "", member="generator_output", read=read_skyrl),
        Format("trl", "TRL: the return value of a rollout_func, by row", trl, "rows", member="env_mask", read=read_trl),
        Format("tinker", "Tinker: Datum, without the advantages", tinker, "data", member="loss_fn_inputs", read=read_tinker),
        Format(
            "nemo-gym",
            "NeMo Gym: results with token ids, for NeMo RL",
            nemo_gym,
            "responses",
            reads_contexts=True,
            member="responses_create_params",
            read=read_nemo_gym,
        ),
        *(
            Format(name, title, verifiers, "", reads_contexts=True, member="nodes", read=read_verifiers)
            for name, title in (
                ("verifiers", "verifiers: Trace, a branch for each sequence"),
                ("prime-rl", "prime-rl: trains on the Trace of verifiers"),
            )
        ),
        Format(
            "atif", "Harbor: Agent Trajectory Interchange Format", atif, "trajectories", reads_contexts=True, member="steps", read=read_atif
        ),
    )
}


class TraceFormat(NamedTuple):
    """A format of traces, which only files have: many sessions share the blocks of their prompts.

    Attributes:
        name: the value of `--format`.
        title: which benchmark or simulator reads it.
        lines: writes a trace as the lines of its file, as JSON values.
    """

    name: str
    title: str
    lines: Callable[[Trace], Iterator[dict[str, Any]]]


TRACES: dict[str, TraceFormat] = {
    one.name: one
    for one in (
        TraceFormat("agentic-mooncake", "Dynamo's simulator: a header, then a row for each call", agentic_mooncake),
        TraceFormat("weka", "aiperf: a trace for each rollout", weka),
    )
}

FILE_FORMATS: Mapping[str, Format | TraceFormat] = ChainMap[str, Any](TRACES, FORMATS)
"""What a file of many sessions can be written in."""


def format_named(name: str) -> Format:
    """Find a format of one rollout by name. Raises `HarnessError` if the name is unknown. The message lists all names."""
    return _named(FORMATS, name)


def file_format_named(name: str) -> Format | TraceFormat:
    """Find a format of a file by name. Raises `HarnessError` as `format_named`."""
    return _named(FILE_FORMATS, name)


def _named(formats: Mapping[str, T], name: str) -> T:
    if name not in formats:
        raise HarnessError(f"format {name[:80]!r} is not one of: {', '.join(formats)}", param="format")
    return formats[name]


def export(
    records: Records, wanted: Format, lengths: Lengths | None = None, *, lag: LagLimit | None = None, model: str = "", text: bool = False
) -> bytes:
    """Write the recorded turns of a session in a format, as JSON text.

    `lengths`, `lag` and `model` limit which of its sequences are written; `""` is any model.

    With `text`, the native format holds the requests too, and `records` must have contexts.
    """
    whole = only_model(rollout(records), model) if model else rollout(records)
    if lag is not None:
        whole = limit_lag(whole, lag)
    return write(limit(whole, lengths) if lengths else whole, wanted, text=text)


def write(whole: Rollout, wanted: Format, *, text: bool = False) -> bytes:
    """Write a rollout in a format, as JSON text, with a digest of each row (`digest`).

    Only the native format has all sequences, those of models that are not trained included, and the tokens to train and the reward of an
    invalid rollout.
    """
    usable = whole if wanted.write is native else without_training(without_placeholders(without_untrained_models(whole)))
    made = native_with_text(usable) if text and wanted.write is native else wanted.write(usable)
    written = msgspec.json.decode(msgspec.json.encode(made))
    for row in [written] if wanted.write is native or not wanted.rows else written[wanted.rows]:
        add_digest(row)
    return msgspec.json.encode(written)
