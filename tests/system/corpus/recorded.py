"""Reads a recorded run: joins the calls that the relay recorded with the turns that the proxy exported.

A turn belongs to the call that served its text under its ids. Several agents may emit the same text, even at the same time; then a call's
turn is one whose parent's ids and handles are in the call's history, and the one that ended first, because the relay writes in that order.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multidict import CIMultiDict

from tests.system.corpus.replies import Reply, read_reply
from tokencache.dialects.registry import dialect_of
from tokencache.testing import build_tokenizer

_PLACE = re.compile(r"/s/[^/]+(?:/h/([^/]+))?(/.*)")
_OK = 200


class MakeError(Exception):
    """A recording cannot become a file of the corpus; the message gives the reason."""


@dataclass(frozen=True)
class Exchange:
    """A call, its reply, and its recorded turn. `path` is the dialect's own, `said` what was sampled, as text."""

    call: dict[str, Any]
    path: str
    dialect: str
    reply: Reply
    turn: dict[str, Any]
    said: str

    @property
    def left(self) -> bool:
        """Whether the harness disconnected before the end."""
        return "aborted" in self.turn["marks"]

    @property
    def began(self) -> float:
        """When it arrived at the proxy, in seconds."""
        return float(self.turn["created"])

    @property
    def ended(self) -> float:
        """When it ended, in seconds."""
        return self.began + float(self.turn["seconds"])


@dataclass(frozen=True)
class Run:
    """A run: its exchanges in the order of their arrival, the export, and other requests (counted by route).

    `about` is what the lab says of it: the program's `version`, and the `engine`. Both are missing in older runs.
    """

    adapter: str
    exchanges: list[Exchange]
    exported: dict[str, Any]
    others: Counter[str]
    about: dict[str, str]


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
        MakeError: The two records are not of the same calls.
    """
    export = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    exported = export.get("trajectories", {})
    if not exported.get("sequences"):
        raise MakeError("the export has no trajectories")
    turns = sorted(
        (turn for sequence in exported["sequences"] for turn in _turns(sequence)), key=lambda one: one[0]["created"] + one[0]["seconds"]
    )
    adapter, exchanges, others = "", {}, Counter()
    for line in (folder / "calls.jsonl").read_text(encoding="utf-8").splitlines():
        call = json.loads(line)
        place = _PLACE.fullmatch(call["path"])
        if place is None:
            raise MakeError(f"{call['path']} lies in no session")
        adapter = place[1] or adapter
        found = _exchange(call, place[2], turns, exchanges)
        if found is None:
            others[f"{call['method']} {place[2].partition('?')[0]}"] += 1
        else:
            turns = [one for one in turns if one[0] is not found.turn]
            exchanges[found.turn["turn"]] = found
    if turns:
        raise MakeError(f"{len(turns)} turns of the export belong to no call that the relay recorded")
    if any(one.turn["finish_reason"] == "length" for one in exchanges.values()):
        raise MakeError("a reply was ended by its token limit: that cannot be replayed in other tokens")
    return Run(adapter, sorted(exchanges.values(), key=lambda one: one.began), exported, others, export.get("about", {}))


def _turns(sequence: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The turns of a sequence, with the sampled text, without the id that ended it."""
    tokenizer = build_tokenizer()
    found = []
    for turn in sequence["turns"]:
        start, end = turn["completion"]
        ids = sequence["token_ids"][start:end]
        found.append((turn, tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.stop_id] else ids)))
    return found


def streams(call: dict[str, Any]) -> bool:
    """Whether a call was answered by a stream of events."""
    kinds = [value for name, value in call["response_headers"] if name.lower() == "content-type"]
    return kinds[0].startswith("text/event-stream")


def _exchange(call: dict[str, Any], path: str, turns: list[tuple[dict[str, Any], str]], before: dict[str, Exchange]) -> Exchange | None:
    """Finds the turn of a call; `None` if it did not request a reply of the model."""
    if call["method"] != "POST" or call["status"] != _OK or not isinstance(call["response_body"], str):
        return None
    route = path.partition("?")[0]
    spoken = dialect_of("POST", route, CIMultiDict(call["request_headers"]))
    dialect = spoken.name if spoken is not None else "chat"
    try:
        reply = read_reply(dialect, call["response_body"], stream=streams(call))
    except (KeyError, ValueError, IndexError, TypeError):  # an answer of another kind: a count, a list
        return None
    for turn, said in turns:
        parent = before.get(turn["parent"] or "")
        handed = {value for _, value in parent.reply.served} if parent is not None else set()
        if _fits(turn, reply) and (not handed or any(value in call["request_body"] for value in handed)):
            return Exchange(call, path, dialect, reply, turn, said)
    return None


def _fits(turn: dict[str, Any], reply: Reply) -> bool:
    served = turn["served"]
    content, thought, calls = served["content"] or "", served["reasoning"] or "", served["tool_calls"]
    if "aborted" in turn["marks"]:
        return reply.delivered_characters > 0 and content.startswith(reply.content) and thought.startswith(reply.reasoning)
    ids = {value for _, value in reply.served}
    return (
        reply.content == content
        and len(reply.calls) == len(calls)
        and (turn["dialect"] == "gemini" or all(one["id"] in ids for one in calls))
    )
