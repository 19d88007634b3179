"""Tests what an engine can do for a model, without relying on version numbers.

The decisive test is whether the engine uses supplied ids. It is a chat request with messages and with ids of another prompt. The ids that
the engine reports as its prompt show which of them it used. The probe makes this test with each driver (`drivers`) and keeps the first that
works. The result is the level at which the proxy serves sessions of the model:

`exact`    The engine uses supplied ids, and it renders with `/tokenize` or adds the tail itself: histories continue token for token.
`record`   The engine reports ids but does not accept any (older vLLM, the Rust frontend), or cannot tokenize: turns are recorded as they
           are, and none continues another.
`relay`    The engine reports no ids: sessions are relayed and marked as incomplete, and no turns are recorded.

Only answers determine the level. A request without an answer ends the probe with an error (`ProbeRequests`). So does a reply that the
engine aborts, because its weights are being replaced. A server error may be one moment's: the finding says so, and is not final.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.turn import Turn
from tokencache.dialects.base import parse_engine_error
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.drivers.base import CHAT, Driver
from tokencache.engine.earlier_thoughts import NO_EFFECT, EarlierThoughts, find_earlier_thoughts, read_reply
from tokencache.engine.generate import has_routes
from tokencache.engine.image_support import ImageRoute, ImageSupport
from tokencache.engine.images import probe_images
from tokencache.engine.logprob_kind import LogprobKind, find_logprob_kind
from tokencache.engine.prefixes import PrefixSupport, probe_prefixes
from tokencache.engine.ranks import find_ranks
from tokencache.engine.reply import Choice, Reply
from tokencache.engine.routers import is_router
from tokencache.engine.template.boundary import ASK, BoundaryUnknownError, stop_candidates
from tokencache.engine.template.renderer import EngineRenderer, RenderError, TemplateRefusedError
from tokencache.engine.upstream import AskChat, EngineClient, EngineResponse, Upstream
from tokencache.errors import NO_ROUTE, NOT_NOW, EngineError, passing_cause

Raw = msgspec.Raw
Level = Literal["exact", "record", "relay"]
Requirement = Literal["processed", "exact", "record", "relay"]
"""What `--require` asks for: a level, or `exact` with processed log probabilities."""
LEVELS: tuple[Level, ...] = ("relay", "record", "exact")
"""From the lowest to the highest."""

PLAIN_ARGS = RenderArgs(b"", b"", {}, {}, {})
_OTHER = b'{"role":"user","content":"Something else altogether."}'
REPLY = b'{"role":"assistant","content":"Well."}'
_SYSTEM = b'{"role":"system","content":"It is late."}'
_QUESTION = Raw(b"[" + ASK + b"]")
_MAX_CANDIDATES = 16
NO_END = "the engine stops at no id with which the template ends a turn, and these ids are ordinary text"
"""Why a model has the level `record` until a reply shows where it ends."""
_VOCABULARY = re.compile(rb"Vocabulary size: ([0-9]{1,10})\b")
BUSY_PAUSES = (0.05, 0.25, 1.0)
"""Seconds before a request is repeated that was refused for now (429, 503)."""


def higher(one: Level, other: Level) -> Level:
    """Return the higher of two levels."""
    return max(one, other, key=LEVELS.index)


async def chat_prompt_ids(ask: AskChat, body: dict[str, Any], reply: Reply | None = None) -> bytes | None:
    """Generate one token and return the packed prompt ids that the engine reports; `None` if it reports none.

    Sets the model's name on `reply`, and the number of tokens that the engine counts.

    Raises:
        EngineError: the engine cannot be reached, or refuses the request.
    """
    answer = await ask({"max_tokens": 1, "temperature": 0, "return_token_ids": True, **body})
    if answer.status != HTTPStatus.OK:
        raise _refusal(answer)
    read = Reply()
    read.add(answer.body)
    if reply is not None:
        reply.model, reply.prompt_counted = read.model, read.prompt_counted
    return read.prompt.packed


class Capability(msgspec.Struct, frozen=True):
    """What an engine can do for one model.

    Attributes:
        model: the model's name.
        level: the table in the module's docstring explains it; `why` is what is missing if it is not `exact`.
        version: the engine's own; `"unknown"` if the engine does not report it.
        driver: the name of the driver that is used; `how` describes how it supplies ids.
        honours_ids: whether the engine uses supplied ids.
        tokenizes: whether `/tokenize` renders conversations.
        adapter: whether the model is a LoRA adapter (`/v1/models` lists its `parent`).
        lists_models: whether `/v1/models` names the model (NeMo RL's worker has no such route).
        served: all names that it lists.
        later_system: whether the template accepts a system message after the first message (Qwen3.5's does not).
        max_model_len: the limit of prompt and completion together, in tokens; 0 if unknown.
        counts: whether its replies say how many tokens they have (`usage`).
        places: whether it is a router, or a frontend, that places sessions itself (`engine.routers`).
        ranks: the number of data-parallel ranks to which requests can be pinned (`engine.ranks`); 1 if it places sessions itself.
        vocabulary: the number of ids that the model has, with those that only pad its vocabulary; 0 if unknown.
        stop_candidates: ids with which the template may end a turn or open the next.
        turn_ends: those candidates that can do nothing else. If a reply ends with one, the engine stops there.
        stop_ids: those candidates at which the engine stopped in a test.
        silent_ends: those `turn_ends` that have no text, because they are special tokens. Without a stop id, they are where a reply ends;
            empty if there is one, or if the template writes several special tokens after a text.
        local_tokenizer: whether the local tokenizer makes small renderings.
        derenders: whether messages can be made of token ids, piece by piece (`derender`), so that broken replies can be continued.
        generates: whether it may have the routes of `engine.generate`, as far as its driver uses them.
        logprobs: the kind of its log probabilities; `""` if the values are not log probabilities or could not be identified.
            `logprobs_seen` explains the finding (`logprob_kind`).
        earlier_thoughts: what a thought in an earlier reply changes for the next one, without template arguments
            (`engine.earlier_thoughts`).
        prefixes: whether prompts can be named by a hash (`engine.prefixes`); `prefixes_why` is why not.
        cautions: what is wrong with the engine's options, or cannot be checked (`Driver.cautions`).
        images, images_why, placeholder_ids, placeholder: how exact prompts with images are supplied (`engine.image_support`).
        failure: the first request that the engine answered with a server error (5xx), and its status; `""` if it answered all.
    """

    model: str
    level: Level
    version: str = "unknown"
    driver: str = ""
    how: str = ""
    honours_ids: bool = False
    tokenizes: bool = False
    adapter: bool = False
    lists_models: bool = True
    served: tuple[str, ...] = ()
    later_system: bool = True
    max_model_len: int = 0
    counts: bool = False
    places: bool = False
    ranks: int = 1
    vocabulary: int = 0
    stop_candidates: tuple[int, ...] = ()
    turn_ends: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    silent_ends: tuple[int, ...] = ()
    local_tokenizer: bool = False
    derenders: bool = False
    generates: bool = False
    logprobs: LogprobKind = ""
    logprobs_seen: str = "not asked"
    earlier_thoughts: EarlierThoughts = NO_EFFECT
    prefixes: bool = False
    prefixes_why: str = "not asked"
    images: ImageRoute = ""
    images_why: str = "not asked"
    placeholder_ids: tuple[int, ...] = ()
    placeholder: tuple[int, ...] = ()
    cautions: tuple[str, ...] = ()
    why: str = ""
    failure: str = ""

    @property
    def adapter_of(self) -> str:
        """The base model of an adapter, which vLLM lists first; `""` if it is none."""
        return self.served[0] if self.adapter else ""

    def sampled(self, turn: Turn, *, named: bool) -> bool:
        """Whether this model sampled a turn that was found for a call of it; `named` is whether the call names it, so that the keys do.

        Adapters of two base models may have the same name.
        """
        same_base = turn.adapter_of == self.adapter_of or (self.adapter and not turn.adapter_of)
        return same_base and (named or not self.model or turn.model in self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that its replies may have. A base model with several (`--served-model-name`) replies with the first (vLLM 0.32)."""
        return (self.model,) if self.adapter else (self.model, *self.served[:1])

    @property
    def is_final(self) -> bool:
        """Whether another probe would find no more, as far as is known."""
        return self.level == "exact" and not self.failure

    def improves(self, known: "Capability") -> bool:
        """Whether this finding replaces an earlier one."""
        return (LEVELS.index(self.level), not self.failure) > (LEVELS.index(known.level), not known.failure)

    @property
    def image_support(self) -> ImageSupport:
        """How exact prompts with images are supplied."""
        return ImageSupport(self.images, self.images_why, self.placeholder_ids, self.placeholder)

    def summary(self) -> str:
        """Describe the finding in one line."""
        found = (
            f"model={self.model or '?'} version={self.version} level={self.level} driver={self.driver} honours_ids={self.honours_ids} "
            f"tokenize={self.tokenizes} max_model_len={self.max_model_len or '?'} places={self.places} ranks={self.ranks} "
            f"vocabulary={self.vocabulary or '?'} stop_ids={list(self.stop_ids or self.silent_ends)} "
            f"local_tokenizer={self.local_tokenizer} images={self.images or 'no'} prefixes={self.prefixes} "
            f"logprobs={self.logprobs or '?'} ({self.logprobs_seen}) earlier_thoughts={self.earlier_thoughts}"
        )
        return found + (f" ({self.why or self.how})" if self.why or self.how else "")


class ProbeRequests:
    """Sends the requests of one probe to an engine, and repeats each until it is answered.

    If a request is never answered, or the engine cannot answer now (429, 503) or aborts the reply, the other answers prove nothing. Then
    `unanswered` is set, even if other code catches the error, and every later request raises it too. `failure` is the first request that
    was answered with another server error, and its status.
    """

    def __init__(self, upstream: Upstream, driver: Driver | None, model: str) -> None:
        self._upstream = upstream
        self.unanswered: EngineError | None = None
        self.failure = ""
        self.driver, self.model = driver, model
        """The driver of the engine, once it is known: its own signs of an engine that cannot answer now count, too."""

    async def get(self, path: str) -> EngineResponse:
        """See `Upstream.get`."""
        return await self.query(path)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """See `Upstream.post`. Nothing that a probe samples is recorded, so this is repeated, too."""
        return await self.query(path, body, headers)

    async def query(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """See `Upstream.query`."""
        if self.unanswered is not None:
            raise self.unanswered
        try:
            answer = await self._upstream.query(path, body, headers)
            for pause in BUSY_PAUSES:  # a busy router refuses some requests, and a probe has some sixty
                if answer.status not in NOT_NOW:
                    break
                await asyncio.sleep(pause)
                answer = await self._upstream.query(path, body, headers)
            await self._check(path, answer)
        except EngineError as why:
            self.unanswered = why
            raise
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and answer.status not in NO_ROUTE:
            self.failure = self.failure or f"{path} answered {answer.status}"
        return answer

    async def _check(self, path: str, answer: EngineResponse) -> None:
        """Check that an answer proves something.

        Raises:
            EngineError: the engine cannot answer now, or was made to break off the reply.
        """
        if answer.status in NOT_NOW:
            raise _refusal(answer)
        if self.driver is not None and await self.driver.refuses_for_now(self._upstream, answer.status, path, self.model):
            raise _not_ready(_refusal(answer))
        if answer.status == HTTPStatus.OK and read_reply(answer.body).aborted:
            raise EngineError("the engine aborted a reply to a probe", status=HTTPStatus.SERVICE_UNAVAILABLE)


def _not_ready(why: EngineError) -> EngineError:
    return EngineError("the engine is not ready yet", private=str(why), status=HTTPStatus.SERVICE_UNAVAILABLE)


def _refusal(answer: EngineResponse) -> EngineError:
    message, _, _ = parse_engine_error(answer.status, answer.body)
    return EngineError(f"the engine answered {answer.status}: {message[:300]}", status=answer.status)


async def probe(upstream: Upstream, drivers: Sequence[Driver], model: str = "", *, known: Driver | None = None) -> Capability:
    """Test what the engine can do for `model`, or for the first model that it serves, with each driver in turn.

    `known` is the driver that an earlier probe chose; `None` if there was none.

    Raises:
        EngineError: the engine cannot be reached, did not answer a request, or refuses the model.
    """
    requests = ProbeRequests(upstream, known, model)
    try:
        found = await _probe(requests, drivers, model)
    except EngineError as why:
        if requests.unanswered is None or requests.unanswered is why:
            raise
        raise requests.unanswered from why
    if requests.unanswered is not None:
        raise requests.unanswered
    return _changed(found, failure=requests.failure)


async def _probe(requests: ProbeRequests, drivers: Sequence[Driver], model: str) -> Capability:
    listed = await listed_models(requests)
    model = model or next(iter(listed), "")
    supply, driver, rendering = await _choose_driver(requests, drivers, model)
    if supply.honoured:
        if rendering.temporary is not None:
            raise rendering.temporary
        requests.driver, requests.model = driver, model or supply.model
    ask, renderer, why_unrendered = partial(driver.ask, requests), rendering.renderer, rendering.failure
    kind, kind_seen = await _logprob_kind(ask, model or supply.model, supply.plain)
    places = driver.names_sessions or (bool(listed) and await is_router(requests))
    found = Capability(
        model or supply.model,
        supply.level,
        version=await driver.version(requests),
        driver=driver.name,
        honours_ids=supply.honoured,
        tokenizes=not why_unrendered,
        adapter=model in listed and isinstance(listed[model].get("parent"), str),
        lists_models=bool(listed),
        served=tuple(listed),
        later_system=rendering.later_system,
        max_model_len=whole(listed.get(model, {}).get(driver.limit_member)) or renderer.max_model_len,
        counts=supply.counts,
        places=places,
        ranks=await find_ranks(requests, model or supply.model, ASK) if driver.ranks and not places else 1,
        vocabulary=await _vocabulary(ask, model or supply.model),
        cautions=await driver.cautions(requests, model or supply.model) if supply.honoured else (),
        generates=driver.generates and await has_routes(requests, model or supply.model, ASK),
        logprobs=kind,
        logprobs_seen=kind_seen,
    )
    if not supply.honoured:
        return _changed(found, why=supply.why + (f" (no rendering: {why_unrendered})" if why_unrendered else ""))
    found = _changed(found, how=driver.how)
    if why_unrendered:
        if driver.adds_tail:
            return _changed(found, level="exact", how=f"{driver.how}; its tail is the engine's: no rendering: {why_unrendered}")
        return _changed(found, level="record", why=f"no rendering: {why_unrendered}")
    try:
        ends = await stop_candidates(renderer, model, PLAIN_ARGS)
    except (BoundaryUnknownError, RenderError) as why:
        return _changed(found, level="record", why=f"the template hides where a reply ends: {why}")
    if why_not := await driver.cannot_parse(requests, renderer, found.model):
        return _changed(found, level="record", why=f"its replies cannot be parsed reliably: {why_not}")
    offered = ends.possible[:_MAX_CANDIDATES]
    blank = await _blank(renderer, model, offered)
    possible = tuple(token for token in offered if token not in blank)
    alone = {token: await _sampled_alone(ask, model, token) for token in possible}
    stops = tuple(token for token, choice in alone.items() if choice is not None and _stopped(choice))
    turn_ends = tuple(token for token in ends.turn_ends if token not in blank)  # a reply that was cut may end with white space
    own_ends = () if stops else [token for token in turn_ends if token in possible]
    silent = tuple([token for token in own_ends if await _is_silent(requests, found.model, supply.plain, token)])
    if any([await _is_silent(requests, found.model, supply.plain, token) for token in ends.after_text[1:] if silent]):
        silent = ()  # which of them a reply ends with is not known
    no_end = not (stops or silent) and any(alone.values())  # an engine without masks shows its stop ids with its first reply
    derenders = driver.derender is not None and await driver.derender.streams(requests, found.model, ids.unpack(supply.plain))
    supplied = partial(driver.probe_members, ASK, REPLY)
    thoughts = await find_earlier_thoughts(ask, renderer, {"model": found.model}, supply.plain, supplied, streams=driver.streams)
    prefixes = await probe_prefixes(ask, found.model, supply.plain) if driver.prefixes else _no_prefixes(driver)
    images = await probe_images(requests, ask, renderer, found.model, supply.plain) if driver.images else _no_images(driver)
    return _changed(
        found,
        level="record" if no_end else "exact",
        why=NO_END if no_end else "",
        stop_candidates=possible,
        turn_ends=turn_ends,
        stop_ids=stops,
        silent_ends=silent,
        derenders=derenders,
        earlier_thoughts=thoughts,
        prefixes=prefixes.accepted,
        prefixes_why=prefixes.why,
        images=images.route,
        images_why=images.why,
        placeholder_ids=images.placeholder_ids,
        placeholder=images.placeholder,
    )


_changed = msgspec.structs.replace


def _no_prefixes(driver: Driver) -> PrefixSupport:
    return PrefixSupport(accepted=False, why=f"the driver {driver.name} cannot name prompts")


def _no_images(driver: Driver) -> ImageSupport:
    return ImageSupport(why=f"the driver {driver.name} cannot supply exact prompts with images")


class _Rendering(NamedTuple):
    """The rendering of a plain question (packed ids), or why it cannot be rendered; `temporary` if it may be later."""

    renderer: EngineRenderer
    plain: bytes = b""
    later_system: bool = True
    failure: str = ""
    temporary: EngineError | None = None


async def _rendering(renderer: EngineRenderer, model: str) -> _Rendering:
    plain = b""
    try:
        plain = await renderer.render(model, [ASK], PLAIN_ARGS, generation=True)
        return _Rendering(renderer, plain, later_system=await _takes_later_system(renderer, model))
    except RenderError as why:
        return _Rendering(renderer, plain, failure=str(why), temporary=passing_cause(why))


class _Supply(NamedTuple):
    """The result of supplying ids with one driver.

    `model` is the name in the engine's answer, and `counts` whether the answer has its number of tokens. `plain` has the packed prompt ids
    of a plain question, empty if the engine does not report them.
    """

    level: Level
    honoured: bool = False
    why: str = ""
    model: str = ""
    plain: bytes = b""
    counts: bool = False


async def _choose_driver(requests: ProbeRequests, drivers: Sequence[Driver], model: str) -> tuple[_Supply, Driver, _Rendering]:
    """Choose the first driver with which the engine uses supplied ids; otherwise the first that the engine did not refuse.

    Raises:
        EngineError: the engine cannot be reached, or refuses the requests of every driver.
    """
    renderings: dict[type[EngineRenderer], _Rendering] = {}
    answered: list[tuple[_Supply, Driver, _Rendering]] = []
    refusals: dict[Driver, EngineError] = {}
    for driver in drivers:
        if driver.renderer not in renderings:
            renderings[driver.renderer] = await _rendering(driver.renderer(requests), model)
        rendering = renderings[driver.renderer]
        try:
            supply = await _supply(requests, driver, model, rendering.plain)
        except EngineError as why:
            if why.passing:
                raise
            if await driver.refuses_for_now(requests, why.status, "", model):
                raise _not_ready(why) from why
            refusals[driver] = why
            continue
        answered.append((supply, driver, rendering))
        if supply.honoured:
            break
    if not answered:
        raise _refused_by_all(refusals)
    return max(answered, key=lambda one: (one[0].honoured, one[0].level == "record"))


async def _supply(requests: ProbeRequests, driver: Driver, model: str, plain: bytes) -> _Supply:
    """Supply ids with which no rendering begins or ends: the prompt of the plain question twice, then its first id."""
    ask, reply = partial(driver.ask, requests), Reply()
    used = plain or await chat_prompt_ids(ask, {"model": model, "messages": _QUESTION}, reply)
    if not used:
        return _Supply("relay", why="the engine reports no token ids")
    wanted = used + used + ids.head(used, 1)
    body = {"model": model, **driver.probe_members(ASK, REPLY, ids.unpack(wanted))}
    refusal = ""
    try:
        echo = await chat_prompt_ids(ask, body, reply)
    except EngineError as why:
        if why.passing or await chat_prompt_ids(ask, {"model": model, "messages": _QUESTION}, reply) is None:
            raise
        await _raise_if_away(requests, driver, model, why)
        echo, refusal = b"", f"supplied ids are refused: {why}"
    if echo is None:
        return _Supply("relay", why="the engine reports no token ids", plain=used)
    found = _Supply("record", model=reply.model, plain=used, counts=reply.prompt_counted is not None)
    if echo == wanted or (driver.adds_tail and echo.startswith(wanted)):
        return found._replace(level="exact", honoured=True)
    if refusal:
        why_not = refusal
    elif wanted.endswith(echo):
        why_not = f"the engine cuts prompts: of {ids.count(wanted)} ids the last {ids.count(echo)} were used"
    elif driver.adds_tail or echo == used:
        why_not = "supplied ids are ignored"
        if driver.ignored_hint and await _tokenizes_supplied(requests, body, wanted):
            why_not = f"{why_not}, although the engine itself takes them: {driver.ignored_hint}"
    else:
        why_not = "neither the supplied ids nor those of /tokenize were used"
    return found._replace(why=why_not)


async def _raise_if_away(requests: ProbeRequests, driver: Driver, model: str, why: EngineError) -> None:
    """Raise an error that is temporary, if an engine has refused supplied ids only because it did not serve the model at that moment."""
    if await driver.refuses_for_now(requests, why.status, CHAT, model):
        raise _not_ready(why) from why


async def _tokenizes_supplied(requests: ProbeRequests, body: Mapping[str, Any], wanted: bytes) -> bool:
    """Whether `/tokenize` uses supplied ids, as vLLM 0.27 and later do: a proxy forwards that route to the engine unchanged."""
    answer = (await requests.post("/tokenize", body)).json()
    return isinstance(answer, dict) and answer.get("tokens") == ids.unpack(wanted)


def _refused_by_all(refusals: Mapping[Driver, EngineError]) -> EngineError:
    """Make one error from the engine's answers to all drivers, with advice if they have no message (500)."""
    first = next(iter(refusals.values()))
    alike = len({why.client_message for why in refusals.values()}) == 1
    words = first.client_message if alike else "; ".join(f"{driver.name}: {why.client_message}" for driver, why in refusals.items())
    if all(why.status == HTTPStatus.INTERNAL_SERVER_ERROR for why in refusals.values()):
        words = "; ".join([words, *(driver.refusal_hint for driver in refusals if driver.refusal_hint)])
    return EngineError(words, private=first.private, status=first.status, reached=first.reached)


async def _logprob_kind(ask: AskChat, model: str, prompt: bytes) -> tuple[LogprobKind, str]:
    """Identify the kind of log probabilities with two ids of a packed prompt, which are certainly in the vocabulary."""
    known = sorted(set(ids.unpack(prompt)))
    if len(known) < 2:  # noqa: PLR2004
        return "", "not asked"
    return await find_logprob_kind(ask, model, _QUESTION, (known[0], known[-1]))


async def _vocabulary(ask: AskChat, model: str) -> int:
    """Return the size of the model's vocabulary; 0 if the engine does not report it.

    vLLM (0.32, `sampling_params.py`) names it when it refuses a stop id that the model does not have. An engine that does not check stop
    ids never samples this one.
    """
    try:
        answer = await ask({"model": model, "messages": _QUESTION, "max_tokens": 1, "stop_token_ids": [ids.ABOVE_ALL_IDS - 1]})
    except EngineError as why:
        if why.passing:
            raise
        return 0
    found = _VOCABULARY.search(answer.body) if answer.status != HTTPStatus.OK else None
    return int(found[1]) if found is not None else 0


async def _takes_later_system(renderer: EngineRenderer, model: str) -> bool:
    try:
        await renderer.render(model, [ASK, REPLY, _SYSTEM, _OTHER], PLAIN_ARGS, generation=True)
    except TemplateRefusedError:
        return False
    return True


async def listed_models(requests: EngineClient) -> dict[str, dict[str, Any]]:
    """Return the models that the engine lists: the entry of each, by its name.

    Raises:
        EngineError: the engine cannot be reached.
    """
    listed = (await requests.get("/v1/models")).json()
    data = listed.get("data") if isinstance(listed, dict) else None
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    return {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}


def whole(value: Any) -> int:
    """Return a member of an engine's answer that must be a whole number; 0 if it is none."""
    return value if isinstance(value, int) else 0


async def _blank(renderer: EngineRenderer, model: str, tokens: Sequence[int]) -> set[int]:
    r"""Find the ids that are only whitespace: the `\n` after Qwen's end of turn does not end a turn."""
    found = set()
    for token in tokens:
        try:
            text = await renderer.read(model, ids.pack([token]))
        except RenderError:  # the engine may lack the route
            break
        if text and not text.strip():
            found.add(token)
    return found


async def _is_silent(requests: ProbeRequests, model: str, plain: bytes, token: int) -> bool:
    """Whether an id at which the engine does not stop has no text: then it is a special token, which no text contains.

    Text completions show it, because the parsers of a chat may keep such tokens in the text.
    """
    body = {"model": model, "prompt": ids.unpack(plain), "max_tokens": 1, "allowed_token_ids": [token], "return_token_ids": True}
    answer = await requests.post("/v1/completions", body)
    reply = Reply()
    if answer.status == HTTPStatus.OK:
        reply.add(answer.body)
    choice = reply.choices.get(0)
    return choice is not None and (list(choice.ids), choice.finish_reason, choice.has_words) == ([token], "length", False)


def _stopped(choice: Choice) -> bool:
    """Whether the engine stopped at the first id."""
    return len(choice.ids) == 1 and choice.finish_reason == "stop"


async def _sampled_alone(ask: AskChat, model: str, token: int) -> Choice | None:
    """Return a reply in which nothing but `token` was allowed, at most twice; `None` if the engine does not give one."""
    body: dict[str, Any] = {
        "model": model,
        "messages": _QUESTION,
        "max_tokens": 2,
        "allowed_token_ids": [token],
        "return_token_ids": True,
    }
    try:
        answer = await ask(body)
    except EngineError as why:
        if why.passing:
            raise
        return None
    if answer.status in NOT_NOW:
        raise _refusal(answer)
    reply = Reply()
    reply.add(answer.body)
    choice = reply.choices.get(0)
    return choice if choice is not None and choice.ids and set(choice.ids) == {token} else None
