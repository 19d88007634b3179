"""Records the ground truth of the simulated engine: the exact token ids of every prompt and completion.

Comparing a proxy's records with what the proxy received would prove little. So the engine itself records every generation: prompt ids,
completion ids and log probabilities, whether or not they were requested, sent, or lost on the way.

`GroundTruthLog` also appends each token to a file before it is sent. If an engine is killed in the middle of a stream, its memory is lost,
and with it the tokens that were sampled but never received. The file keeps them: SIGKILL does not undo a completed `write`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class GroundTruthEntry:
    """One generation: one choice of one completion.

    Attributes:
        request_id: `id` of the completion. All choices of a request share it.
        index: position among the choices of the request.
        session: header `X-Session-ID`, or `session_id` in the body.
        model: name of the model.
        stream: whether the reply is streamed.
        ids_supplied: whether the prompt was given as ids (`kv_transfer_params.prompt_token_ids`) and used as such.
        prompt_ids: ids of the prompt.
        completion_ids: ids generated so far, including the end-of-turn id and the ids of a stop string.
        logprobs: natural logarithms (float32 values), one for each completion id.
        finish_reason: `stop`, `length`, `tool_calls` or `abort`; `None` while the generation runs.
        stop_reason: the stop id or stop string that ended it, if any.
        versions: the weights that sampled each id, if the engine's weights have a name; see `weights`.
        prompt_versions: the weights that computed the keys and values of each id of the prompt, in the same case.
        cached: number of the prompt's ids that were found in the prefix cache, in the same case.
        aborted: whether the client disconnected, or a fault cut the connection, before the last id was sent.
    """

    request_id: str
    index: int
    session: str | None
    model: str
    stream: bool
    ids_supplied: bool
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    aborted: bool = False
    versions: list[str] = field(default_factory=list)
    prompt_versions: list[str] = field(default_factory=list)
    cached: int = 0


_HEAD = ("request_id", "index", "session", "model", "stream", "ids_supplied", "prompt_ids")
_STATE = ("finish_reason", "stop_reason", "aborted", "versions", "prompt_versions", "cached")


class GroundTruthLog:
    """Appends new tokens of entries to a file, one JSON line for each step. Several engines may share the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._known: dict[int, tuple[str, GroundTruthEntry]] = {}  # keeps entries alive, so that their `id()` stays unique
        self._written: dict[str, int] = {}

    def append(self, entry: GroundTruthEntry) -> None:
        """Write the new part of an entry; the first time, the whole entry."""
        name, _ = self._known.setdefault(id(entry), (f"{os.getpid()}-{len(self._known)}", entry))
        at = self._written.get(name)
        line: dict[str, Any] = {"entry": name} if at is not None else {"entry": name} | {field: getattr(entry, field) for field in _HEAD}
        line |= {"ids": entry.completion_ids[at or 0 :], "logprobs": entry.logprobs[at or 0 :]}
        line |= {field: getattr(entry, field) for field in _STATE}
        self._written[name] = len(entry.completion_ids)
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_ground_truth(path: Path) -> list[GroundTruthEntry]:
    """Read the entries of all engines that wrote to a file, in the order in which generations began.

    Generations without a token are missing. A last line that a crash cut off is skipped: its token was never sent.
    """
    entries: dict[str, GroundTruthEntry] = {}
    for raw in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        line = json.loads(raw)
        if line["entry"] not in entries:
            entries[line["entry"]] = GroundTruthEntry(**{field: line[field] for field in _HEAD})
        entry = entries[line["entry"]]
        entry.completion_ids += line["ids"]
        entry.logprobs += line["logprobs"]
        for name in _STATE:
            setattr(entry, name, line[name])
    return list(entries.values())
