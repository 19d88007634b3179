"""The probe: what can this engine do? Found out by asking, never by version number.

The one question that matters is whether supplied ids are honoured: a chat call whose messages say one thing and whose
ids say another; the ids that the engine says it used tell which it followed. It is asked in the words of each driver
(`driver`), and the first that is followed is the one to speak with. What is found makes the level at which the proxy serves
sessions of a model:

`exact`    ids are honoured, and `/tokenize` answers or the engine itself adds the tail: histories are continued token for
           token
`record`   the engine reports ids but does not take them (older vLLM, the Rust frontend), or cannot tokenize: turns are
           recorded as they are, and none continues another
`relay`    the engine reports no ids: sessions are relayed and marked, nothing can be recorded

A level is concluded from answers alone. A question that is not answered (`questions`) ends the probe with an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.drivers.base import CHAT, Driver, DriverChat
from tokencache.engine.drivers.text_prompts import TokenPrompts
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.logprobs import Kind, logprob_kind
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.questions import Questions
from tokencache.engine.reply import Reply
from tokencache.engine.standing import Level
from tokencache.engine.template.agreement import EPISODE, TOOL, echo_of_chat
from tokencache.engine.template.boundary import ASK, BoundaryUnknownError, candidates
from tokencache.engine.template.renderer import REFUSALS, EngineRenderer, Renderer, RenderError, TemplateRefusedError
from tokencache.engine.upstream import Upstream
from tokencache.errors import NOT_NOW, EngineError

Raw = msgspec.Raw

PLAIN_ARGS = RenderArgs(b"", b"", {}, {}, {})
_OTHER = b'{"role":"user","content":"Something else altogether."}'
_OK, _NO_ROUTE, _BARE = 200, 404, 500
_REPLY = b'{"role":"assistant","content":"Well."}'
_SYSTEM = b'{"role":"system","content":"It is late."}'
_ASKED = Raw(b"[" + ASK + b"]")
_MAX_CANDIDATES = 16


class Capability(msgspec.Struct, frozen=True):
    """What an engine can do for one model.

    Attributes:
        level: what follows for sessions, see above; `why` says what is missing where it is not `exact`.
        version: as `/version` says; `"unknown"` if it does not.
        driver: how it is spoken to (`driver`); `how` says in words how ids are handed in.
        honours_ids: whether ids that are handed in are used.
        tokenizes: whether `/tokenize` renders conversations.
        lists_models: whether `/v1/models` names the model (NeMo RL's worker has no such route).
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
    driver: str = "vllm"
    how: str = ""
    honours_ids: bool = False
    tokenizes: bool = False
    lists_models: bool = True
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
            f"model={self.model or '?'} version={self.version} level={self.level} driver={self.driver} honours_ids={self.honours_ids} "
            f"tokenize={self.tokenizes} max_model_len={self.max_model_len or '?'} stop_ids={list(self.stop_ids)} "
            f"local_tokenizer={self.local_tokenizer} logprobs={self.logprobs or '?'} ({self.logprobs_seen})"
        )
        return found + (f" ({self.why or self.how})" if self.why or self.how else "")


async def probe(upstream: Upstream, model: str = "", kinds: Sequence[Driver] = (Vllm(),)) -> Capability:
    """Find out what the engine can do for `model`, or for the first that it serves, asking in the words of each driver in turn.

    Raises:
        EngineError: the engine cannot be reached, left a question unanswered, or refuses the model.
    """
    questions = Questions(upstream)
    try:
        found = await _found(questions, model, kinds)
    except EngineError as why:
        if questions.unanswered is None or questions.unanswered is why:
            raise
        raise questions.unanswered from why
    if questions.unanswered is not None:
        raise questions.unanswered
    return found


async def _found(upstream: Questions, model: str, kinds: Sequence[Driver]) -> Capability:
    renderer = EngineRenderer(upstream)
    version = (await upstream.get("/version")).json()
    listed = await _models(upstream)
    model = model or next(iter(listed), "")
    found = Capability(
        model,
        "relay",
        version.get("version", "unknown") if isinstance(version, dict) else "unknown",
        lists_models=bool(listed),
        max_model_len=listed.get(model, 0),
    )
    plain, unrendered = b"", ""
    try:
        plain = await renderer.render(model, [ASK], PLAIN_ARGS, generation=True)
        found = msgspec.structs.replace(found, tokenizes=True, later_system=await _takes_later_system(renderer, model))
    except RenderError as why:
        unrendered = str(why)
    found = msgspec.structs.replace(found, max_model_len=found.max_model_len or renderer.max_model_len)
    supply, driver, used = await _driver(upstream, model, kinds, plain)
    asked = DriverChat(upstream, driver)
    found = msgspec.structs.replace(found, driver=driver.name, honours_ids=supply.honoured, model=model or supply.model)
    found = await _with_logprobs(found, asked, plain or used)
    if not supply.honoured:
        why_not = supply.why + (f" (no rendering: {unrendered})" if unrendered else "")
        return msgspec.structs.replace(found, level=supply.level, why=why_not)
    found = msgspec.structs.replace(found, how=driver.how)
    if not found.tokenizes:
        if driver.adds_tail:
            return msgspec.structs.replace(found, level="exact", how=f"{driver.how}; its tail is the engine's: no rendering: {unrendered}")
        return msgspec.structs.replace(found, level="record", why=f"no rendering: {unrendered}")
    try:
        ends = await candidates(renderer, model, PLAIN_ARGS)
    except (BoundaryUnknownError, RenderError) as why:
        return msgspec.structs.replace(found, level="record", why=f"the template hides where a reply ends: {why}")
    if driver.detour is not None:
        doubt = await _misparses(asked, upstream, driver.detour, renderer, found.model)
        if doubt:
            return msgspec.structs.replace(found, level="record", why=f"derender cannot be trusted: {doubt}")
    offered = ends.possible[:_MAX_CANDIDATES]
    blank = await _blank(upstream, model, offered)
    possible = tuple(token for token in offered if token not in blank)
    stops = tuple([token for token in possible if await _stops_at(asked, model, token)])
    return msgspec.structs.replace(found, level="exact", stop_candidates=possible, turn_ends=tuple(ends.turn_ends), stop_ids=stops)


class _Supply(NamedTuple):
    """What became of supplied ids, asked in one driver's words; `model` is the name that the engine answers with."""

    level: Level
    honoured: bool = False
    why: str = ""
    model: str = ""


async def _driver(upstream: Questions, model: str, kinds: Sequence[Driver], plain: bytes) -> tuple[_Supply, Driver, bytes]:
    """Find the driver whose way of handing in ids works, and say what came of it: the first that does, else the first that was answered.

    Returns:
        What came of it, the driver, and the prompt of a plain question (packed ids; empty if the engine does not say it).

    Raises:
        EngineError: the engine cannot be reached, or refuses every driver's question.
    """
    answered: list[tuple[_Supply, Driver, bytes]] = []
    refusals: dict[str, EngineError] = {}
    for driver in kinds:
        try:
            found = await _supply(DriverChat(upstream, driver), driver, model, plain)
        except EngineError as why:
            if why.passing:
                raise
            refusals[driver.name] = why
            continue
        answered.append((found[0], driver, found[1]))
        if found[0].honoured:
            break
    if not answered:
        raise _refused(refusals)
    return max(answered, key=lambda one: (one[0].honoured, one[0].level == "record"))


async def _supply(asked: DriverChat, driver: Driver, model: str, plain: bytes) -> tuple[_Supply, bytes]:
    """Hand in ids that no rendering begins or ends with: the plain question's prompt twice, and its first id."""
    said = Reply()
    used = plain or await echo_of_chat(asked, {"model": model, "messages": _ASKED}, said)
    if not used:
        return _Supply("relay", why="the engine reports no token ids"), b""
    wanted = used + used + ids.head(used, 1)
    body = {"model": model, **driver.supplied(ASK, _REPLY, ids.unpack(wanted))}
    try:
        echo = await echo_of_chat(asked, body, said)
    except EngineError as why:
        if why.passing or await echo_of_chat(asked, {"model": model, "messages": _ASKED}, said) is None:
            raise
        return _Supply("record", why=f"supplied ids are refused: {why}", model=said.model), used
    if echo is None:
        return _Supply("relay", why="the engine reports no token ids"), used
    if echo == wanted or (driver.adds_tail and echo.startswith(wanted)):
        return _Supply("exact", honoured=True, model=said.model), used
    if wanted.endswith(echo):
        why_not = f"the engine cuts prompts: of {ids.count(wanted)} ids the last {ids.count(echo)} were used"
    elif driver.adds_tail or echo == used:
        why_not = "supplied ids are ignored"
    else:
        why_not = "neither the supplied ids nor those of /tokenize were used"
    return _Supply("record", why=why_not, model=said.model), used


def _refused(refusals: Mapping[str, EngineError]) -> EngineError:
    """Make one error of what the engine answered to each driver, and say what may be behind a refusal without words."""
    first, *others = refusals.values()
    words = "; ".join(f"{name}: {why}" for name, why in refusals.items()) if others else str(first)
    if all(why.status == _BARE for why in refusals.values()):
        words += "; NeMo RL's worker answers so to sampling parameters other than the trainer's: name them with --sampling"
    return EngineError(words, status=first.status, reached=first.reached)


async def _with_logprobs(found: Capability, asked: DriverChat, prompt: bytes) -> Capability:
    """Find out what the log probabilities are, with two ids of a prompt (packed): such as there are in the vocabulary."""
    known = sorted(set(ids.unpack(prompt)))
    if len(known) < 2:  # noqa: PLR2004
        return found
    kind, seen = await logprob_kind(asked, found.model, _ASKED, (known[0], known[-1]))
    return msgspec.structs.replace(found, logprobs=kind, logprobs_seen=seen)


async def _misparses(asked: DriverChat, upstream: Questions, detour: TokenPrompts, renderer: Renderer, model: str) -> str:
    """Say how derender's words differ from chat's own, for a reply of the model; and from a call as the template writes it; `""` if not."""
    request: dict[str, Any] = {"model": model, "messages": _ASKED, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    answer = await asked.post(CHAT, request)
    told = Reply()
    told.take(answer.body)
    prompt = read_ids(told.prompt.raw)
    if answer.status in NOT_NOW or prompt is None or 0 not in told.choices:
        raise EngineError(f"the engine answered {answer.status}", status=answer.status)
    ended = told.choices[0].finish_reason == "stop"
    try:
        sampled = told.choices[0].ids
        said = await detour.says(upstream, request, ids.unpack(prompt), sampled[:-1] if ended else sampled)
        theirs, ours = (reply.choices[0].message(with_reasoning=True) for reply in (told, said))
        if [_bare(theirs.content), _bare(theirs.reasoning)] != [_bare(ours.content), _bare(ours.reasoning)]:
            return "it splits a reply otherwise than chat does: with other parsers, perhaps"
        request |= {"tools": TOOL, "max_tokens": 1}
        if (await asked.post(CHAT, request)).status in REFUSALS:
            return ""  # an engine without a parser of tool calls takes no tools
        args = msgspec.structs.replace(PLAIN_ARGS, tools=TOOL)
        before = await renderer.render(model, EPISODE[:1], args, generation=True)
        behind = await renderer.render(model, EPISODE[:2], args, generation=False)
        start = ids.common_head(before, behind)
        said = await detour.says(upstream, request, ids.unpack(ids.head(before, start)), ids.unpack(ids.tail(behind, start)))
    except RenderError as why:
        return f"no tool call is there to be shown to it: {why}"
    except EngineError as why:
        if why.passing:
            raise
        return str(why)
    calls = [(call.name, msgspec.json.decode(call.arguments)) for call in said.choices[0].message(with_reasoning=True).calls]
    return "" if calls == [("f", {"a": "b"})] else "it does not find the tool call that the template writes"


def _bare(text: str | None) -> str:
    """A text without an unfinished character at its end."""
    return (text or "").rstrip("\ufffd")


async def _takes_later_system(renderer: Renderer, model: str) -> bool:
    try:
        await renderer.render(model, [ASK, _REPLY, _SYSTEM, _OTHER], PLAIN_ARGS, generation=True)
    except TemplateRefusedError:
        return False
    return True


async def _models(upstream: Questions) -> dict[str, int]:
    listed = (await upstream.get("/v1/models")).json()
    data = listed.get("data") if isinstance(listed, dict) else None
    found = {}
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            found[entry["id"]] = entry["max_model_len"] if isinstance(entry.get("max_model_len"), int) else 0
    return found


async def _blank(upstream: Questions, model: str, tokens: Sequence[int]) -> set[int]:
    r"""Find the ids that are mere white space: the `\n` behind Qwen's end of turn is no end of turn, whoever says so."""
    found = set()
    for token in tokens:
        answer = await upstream.post("/detokenize", {"model": model, "tokens": [token]})
        if answer.status == _NO_ROUTE:
            break
        said = answer.json()
        text = said.get("prompt") if answer.status == _OK and isinstance(said, dict) else None
        if isinstance(text, str) and text and not text.strip():
            found.add(token)
    return found


async def _stops_at(asked: DriverChat, model: str, token: int) -> bool:
    """Let the engine sample nothing but `token`: does it stop there, or go on to the limit?"""
    body: dict[str, Any] = {
        "model": model,
        "messages": _ASKED,
        "max_tokens": 2,
        "allowed_token_ids": [token],
        "return_token_ids": True,
    }
    try:
        answer = await asked.post(CHAT, body)
    except EngineError as why:
        if why.passing:
            raise
        return False
    if answer.status in NOT_NOW:
        raise EngineError(f"the engine answered {answer.status}", status=answer.status)
    reply = Reply()
    reply.take(answer.body)
    choice = reply.choices.get(0)
    return choice is not None and choice.ids == [token] and choice.finish_reason == "stop"
