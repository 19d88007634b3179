"""The probe: what can this engine do? Found out by asking, never by version number.

The one question that matters is whether supplied ids are honoured: a chat call whose messages say one thing and whose
`prompt_token_ids` say another; the ids that the engine says it used tell which it followed. What is found makes the
level at which the proxy serves sessions of a model:

`exact`    ids are honoured and `/tokenize` answers: histories are continued token for token
`record`   the engine reports ids but does not take them (older vLLM, the Rust frontend), or cannot tokenize: turns are
           recorded as they are, and none continues another
`relay`    the engine reports no ids: sessions are relayed and marked, nothing can be recorded
"""

from typing import Any, Literal

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engines.logprobs import Kind, logprob_kind
from tokencache.engines.reply import Reply
from tokencache.engines.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.render.agreement import echo_of_chat
from tokencache.render.boundary import ASK, BoundaryUnknownError, candidates
from tokencache.render.renderer import Renderer, RenderError, TemplateRefusedError

Raw = msgspec.Raw
Level = Literal["exact", "record", "relay"]

PLAIN_ARGS = RenderArgs(b"", b"", {}, {}, {})
_OTHER = b'{"role":"user","content":"Something else altogether."}'
_REPLY = b'{"role":"assistant","content":"Well."}'
_SYSTEM = b'{"role":"system","content":"It is late."}'
_ASKED = Raw(b"[" + ASK + b"]")
_MAX_CANDIDATES = 16


class Capability(msgspec.Struct, frozen=True):
    """What an engine can do for one model.

    Attributes:
        level: what follows for sessions, see above; `why` says what is missing where it is not `exact`.
        version: as `/version` says; `"unknown"` if it does not.
        honours_ids: whether `kv_transfer_params.prompt_token_ids` replaces the prompt.
        tokenizes: whether `/tokenize` renders conversations.
        later_system: whether the template takes a system message behind the first message (Qwen3.5's does not).
        max_model_len: the longest prompt and completion together, in tokens; 0 if unknown.
        stop_candidates: ids with which the template may end a turn or open the next.
        turn_ends: those of them that can only do that: a reply that ends with one tells that the engine stops there.
        stop_ids: those of them at which generation was seen to stop.
        local_tokenizer: whether small renderings are the local tokenizer's.
        logprobs: what its log probabilities are, `""` if they are none or it could not be found out; `logprobs_seen` says how it
            was found out, or why not (`logprobs`).
    """

    model: str
    level: Level
    version: str = "unknown"
    honours_ids: bool = False
    tokenizes: bool = False
    later_system: bool = True
    max_model_len: int = 0
    stop_candidates: tuple[int, ...] = ()
    turn_ends: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    local_tokenizer: bool = False
    logprobs: Kind = ""
    logprobs_seen: str = "not asked"
    why: str = ""

    def line(self) -> str:
        """Say in one line what was found."""
        found = (
            f"model={self.model or '?'} vllm={self.version} level={self.level} honours_ids={self.honours_ids} "
            f"tokenize={self.tokenizes} max_model_len={self.max_model_len or '?'} stop_ids={list(self.stop_ids)} "
            f"local_tokenizer={self.local_tokenizer} logprobs={self.logprobs or '?'} ({self.logprobs_seen})"
        )
        return found + (f" ({self.why})" if self.why else "")


async def probe(upstream: Upstream, renderer: Renderer, model: str = "") -> Capability:
    """Find out what the engine can do for `model`, or for the first that it serves.

    Raises:
        EngineError: the engine cannot be reached, or refuses the model.
    """
    version = (await upstream.get("/version")).json()
    listed = await _models(upstream)
    model = model or next(iter(listed), "")
    found = Capability(
        model, "relay", version.get("version", "unknown") if isinstance(version, dict) else "unknown", max_model_len=listed.get(model, 0)
    )
    try:
        plain, other = [await renderer.render(model, [m], PLAIN_ARGS, generation=True) for m in (ASK, _OTHER)]
    except RenderError as why:
        echo = await echo_of_chat(upstream, {"model": model, "messages": _ASKED})
        found = await _with_logprobs(found, upstream, echo or b"")
        return msgspec.structs.replace(found, level="relay" if echo is None else "record", why=f"no rendering: {why}")
    found = msgspec.structs.replace(found, tokenizes=True, later_system=await _takes_later_system(renderer, model))
    found = await _with_logprobs(found, upstream, plain)
    supplied = {"kv_transfer_params": {"prompt_token_ids": ids.unpack(other)}}
    echo = await echo_of_chat(upstream, {"model": model, "messages": _ASKED, **supplied})
    if echo is None:
        return msgspec.structs.replace(found, why="the engine reports no token ids")
    if echo != other:
        why_not = "supplied ids are ignored" if echo == plain else "neither the supplied ids nor those of /tokenize were used"
        return msgspec.structs.replace(found, level="record", why=why_not)
    try:
        ends = await candidates(renderer, model, PLAIN_ARGS)
    except (BoundaryUnknownError, RenderError) as why:
        return msgspec.structs.replace(found, level="record", honours_ids=True, why=f"the template hides where a reply ends: {why}")
    possible = tuple([token for token in ends.possible[:_MAX_CANDIDATES] if not await _is_blank(upstream, model, token)])
    stops = tuple([token for token in possible if await _stops_at(upstream, model, token)])
    return msgspec.structs.replace(
        found, level="exact", honours_ids=True, stop_candidates=possible, turn_ends=tuple(ends.turn_ends), stop_ids=stops
    )


async def _with_logprobs(found: Capability, upstream: Upstream, prompt: bytes) -> Capability:
    """Find out what the log probabilities are, with two ids of a prompt (packed): such as there are in the vocabulary."""
    known = sorted(set(ids.unpack(prompt)))
    if len(known) < 2:  # noqa: PLR2004
        return found
    kind, seen = await logprob_kind(upstream, found.model, _ASKED, (known[0], known[-1]))
    return msgspec.structs.replace(found, logprobs=kind, logprobs_seen=seen)


async def _takes_later_system(renderer: Renderer, model: str) -> bool:
    try:
        await renderer.render(model, [ASK, _REPLY, _SYSTEM, _OTHER], PLAIN_ARGS, generation=True)
    except TemplateRefusedError:
        return False
    return True


async def _models(upstream: Upstream) -> dict[str, int]:
    listed = (await upstream.get("/v1/models")).json()
    data = listed.get("data") if isinstance(listed, dict) else None
    found = {}
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            found[entry["id"]] = entry["max_model_len"] if isinstance(entry.get("max_model_len"), int) else 0
    return found


async def _is_blank(upstream: Upstream, model: str, token: int) -> bool:
    r"""Ask whether an id is mere white space: the `\n` behind Qwen's end of turn is no end of turn, whoever says so."""
    try:
        answer = await upstream.post("/detokenize", {"model": model, "tokens": [token]})
    except EngineError:
        return False
    said = answer.json()
    text = said.get("prompt") if answer.status == 200 and isinstance(said, dict) else None  # noqa: PLR2004
    return isinstance(text, str) and text != "" and not text.strip()


async def _stops_at(upstream: Upstream, model: str, token: int) -> bool:
    """Let the engine sample nothing but `token`: does it stop there, or go on to the limit?"""
    body: dict[str, Any] = {
        "model": model,
        "messages": _ASKED,
        "max_tokens": 2,
        "allowed_token_ids": [token],
        "return_token_ids": True,
    }
    try:
        answer = await upstream.post("/v1/chat/completions", body)
    except EngineError:
        return False
    reply = Reply()
    reply.take(answer.body)
    choice = reply.choices.get(0)
    return choice is not None and choice.ids == [token] and choice.finish_reason == "stop"
