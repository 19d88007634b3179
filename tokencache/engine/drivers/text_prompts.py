"""The driver for engines that take ids as text completions only: token prompts, parsed by `derender`.

For a vLLM that ignores ids in chat (0.20 to 0.26) and on which the plugin cannot be installed. A call with an exact prompt makes a
detour, in up to three steps; the rest of the proxy sees one chat completion:

1. *Guidance.* What chat would constrain sampling with (a required or a strict tool, a format) its parsers make of the request, and
   what limits a reply may be the server's own. `/v1/chat/completions/render` says both, asked with the call's tools and a question in
   the place of its messages; once for each set of tools.
2. *Tokens.* `/v1/completions` with `prompt: [ids]` samples. Ids and log probabilities are those of its answer.
3. *Words.* `/v1/chat/completions/derender` (vLLM 0.24 and later; behind `--enable-scale-out` since 0.30; a `vllm launch render`
   sidecar always answers) makes the message of them, with the same parsers as chat.

What derender leaves to its caller is done here, as chat does it (vLLM 0.32, `entrypoints/openai/chat_completion/serving.py`): a last id
that only ended the reply is not said; where a stop string cut the text, the text is what is parsed, read into ids again by `/tokenize`; the
finish reason of tool calls; one call only without `parallel_tool_calls`.

A call without an exact prompt needs no detour: it is an ordinary chat completion, and vLLM renders it, media and all.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from multidict import CIMultiDict

from tokencache.core import ids
from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.drivers.base import CHAT, Exact
from tokencache.engine.drivers.vllm import NOT_WHOLE, Vllm, members_with_ids
from tokencache.engine.questions import Answers, until_answered
from tokencache.engine.reply import Reply
from tokencache.engine.upstream import EngineResponse, Upstream
from tokencache.errors import EngineError

Raw = msgspec.Raw

PATH = "/v1/completions"
DERENDER = CHAT + "/derender"
RENDER = CHAT + "/render"

_OK, _BAD_GATEWAY, _UNAVAILABLE = 200, 502, 503
_NULL, _TRUE = Raw(b"null"), Raw(b"true")
_NOTHING = frozenset({b"null", b"[]", b"{}"})
_OF_CHAT = frozenset({
    *NOT_WHOLE, "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "echo",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents",
    "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "response_format", "structured_outputs", "functions", "function_call",
})  # fmt: skip
"""Members of a chat request that completions have not, or otherwise."""
_GUIDING = (
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "parallel_tool_calls",
    "reasoning_effort",
    "chat_template_kwargs",
)
_LIMITS = ("max_completion_tokens", "max_tokens")
_NOT_EVERYWHERE = ("bad_words",)
"""Members that vLLM's chat takes, and its completions took only later: silently ignored before (0.20 to 0.25)."""
_ASK = Raw(b'[{"role":"user","content":"Hello."}]')
_UNSAID: dict[str, Any] = {"role": "assistant", "content": None}
_MOST_GUIDES = 256
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_IDS = msgspec.json.Decoder(list[int])
_ENCODER = msgspec.json.Encoder()


class ParsedCompletion(NamedTuple):
    """A chat completion's body; `why` it has no messages, `""` if it has; `passing`: it may have them later."""

    body: bytes
    why: str = ""
    passing: bool = False


class Guide(NamedTuple):
    """What chat would sample with: `outputs` constrain it (`structured_outputs`), `limit` is the server's own for a reply, in tokens."""

    outputs: Mapping[str, Any] | None = None
    limit: int | None = None


class _Sampling(msgspec.Struct):
    max_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None


class _Rendered(msgspec.Struct):
    """vLLM's `GenerateRequest`, as `render` gives it."""

    sampling_params: _Sampling

    def guide(self) -> Guide:
        outputs = {name: value for name, value in (self.sampling_params.structured_outputs or {}).items() if value is not None}
        shown = {name: value for name, value in outputs.items() if not name.startswith("_")}
        return Guide(shown or None, self.sampling_params.max_tokens)


class TokenPrompts:
    """The detour: completions of an engine, and the parsers of `parser`, or of the engine itself if that is `None`."""

    def __init__(self, parser: Upstream | None = None) -> None:
        self._parser = parser
        self._guides: dict[bytes, Guide] = {}

    async def body(self, upstream: Answers, call: ChatCall, exact: Exact, longest: int, headers: CIMultiDict[str]) -> bytes | None:
        """Write the request for completions; `None` if they cannot be asked for what this call asks: then chat can.

        `longest` is how many tokens prompt and reply may have together.
        """
        fields = members_with_ids(call)
        if bytes(fields.get("logprobs", _NULL)) != b"true" or any(_there(fields, name) for name in _NOT_EVERYWHERE):
            return None
        constrained = any(_there(fields, name) for name in ("tools", "response_format", "structured_outputs"))
        limited = any(_there(fields, name) for name in _LIMITS)
        if limited and not constrained:
            return written(fields, exact.fragment, Guide())
        guide = await self._guide(upstream, fields, headers)
        if guide is None:
            return None
        room = longest - ids.count(exact.ids) if longest else guide.limit
        return written(fields, exact.fragment, guide._replace(limit=min(filter(None, (guide.limit, room)), default=None)))

    async def _guide(self, upstream: Answers, fields: Mapping[str, Raw], headers: CIMultiDict[str]) -> Guide | None:
        """What chat would make of a call with these members; `None` if it cannot be found out."""
        asked = {name: fields[name] for name in ("model", *_GUIDING) if name in fields} | {"messages": _ASK}
        body = _ENCODER.encode(asked)
        key = hashlib.blake2b(body, digest_size=16).digest()
        if key not in self._guides:
            try:
                answer = await self._ask(upstream, RENDER, body, headers)
                rendered = msgspec.json.decode(answer.body, type=_Rendered) if answer.status == _OK else None
            except (EngineError, ValueError, RecursionError):
                rendered = None
            if rendered is None:
                return None
            while len(self._guides) >= _MOST_GUIDES:
                self._guides.pop(next(iter(self._guides)))
            self._guides[key] = rendered.guide()
        return self._guides[key]

    async def parsed(
        self, upstream: Answers, fields: Mapping[str, Raw], body: bytes, headers: CIMultiDict[str] | None = None
    ) -> ParsedCompletion:
        """Make a chat completion of the answer of completions; `fields` are the members of the chat request.

        Where the words cannot be had, ids and log probabilities are there all the same, and it is said why. A body that is no
        completion is given back as it is.
        """
        try:
            said = _FIELDS.decode(body)
            choices = _CHOICES.decode(said["choices"])
            sampled = [_IDS.decode(choice["token_ids"]) for choice in choices]
        except (ValueError, KeyError, RecursionError):
            return ParsedCompletion(body)
        if not choices:
            return ParsedCompletion(body)
        messages: list[dict[str, Any]] = [dict(_UNSAID) for _ in choices]
        why, passing = "", False
        try:
            heard = [await self._heard(upstream, fields, choice, tokens, headers) for choice, tokens in zip(choices, sampled, strict=True)]
            messages = await self._messages(upstream, fields, choices, heard, headers)
        except EngineError as failed:
            why, passing = str(failed), failed.passing
        return ParsedCompletion(_as_chat(said, choices, messages, fields, why), why, passing)

    async def _messages(
        self,
        upstream: Answers,
        fields: Mapping[str, Raw],
        choices: list[dict[str, Raw]],
        heard: list[list[int]],
        headers: CIMultiDict[str] | None,
    ) -> list[dict[str, Any]]:
        """The messages of all choices, of which these ids are to be heard.

        Raises:
            EngineError: derender cannot be reached, or refuses.
        """
        given: list[dict[str, Any]] = [
            {"index": index, "token_ids": tokens, "finish_reason": choice.get("finish_reason", _NULL)}
            for index, (choice, tokens) in enumerate(zip(choices, heard, strict=True))
            if tokens
        ]
        messages: list[dict[str, Any]] = [dict(_UNSAID) for _ in choices]
        if not given:
            return messages
        prompt = choices[0].get("prompt_token_ids", _NULL)
        asked = {name: value for name, value in fields.items() if name not in NOT_WHOLE} | {"include_reasoning": _TRUE}
        answer = await self._ask(
            upstream,
            DERENDER,
            _ENCODER.encode(
                {
                    "model": fields.get("model", _NULL),
                    "generate_response": {"request_id": "derender", "choices": given, "prompt_token_ids": prompt},
                    "prompt_token_ids": prompt,
                    "chat_request": asked,
                }
            ),
            headers,
        )
        found = answer.json()
        told = found.get("choices") if answer.status == _OK and isinstance(found, dict) else None
        if not isinstance(told, list) or len(told) != len(given):
            words = answer.body[:300].decode(errors="replace")
            raise EngineError(f"{DERENDER} answered {answer.status}: {words}; the tokens are recorded")
        try:
            for choice in told:
                messages[choice["index"]] = dict(choice["message"])
        except (KeyError, IndexError, TypeError, ValueError) as why:
            raise EngineError(f"{DERENDER} gave no messages: {type(why).__name__}: {why}; the tokens are recorded") from why
        return messages

    async def _heard(
        self, upstream: Answers, fields: Mapping[str, Raw], choice: dict[str, Raw], tokens: list[int], headers: CIMultiDict[str] | None
    ) -> list[int]:
        """The ids whose text a harness is to hear: the sampled ones, less what only ended the reply.

        Raises:
            EngineError: the engine cannot read the text that a stop string left.
        """
        reason, shown = bytes(choice.get("stop_reason", _NULL)), bytes(fields.get("include_stop_str_in_output", _NULL)) == b"true"
        if reason.startswith(b'"') and bytes(choice.get("finish_reason", _NULL)) == b'"stop"':
            asked = {"model": fields.get("model", _NULL), "prompt": choice.get("text", _NULL), "add_special_tokens": False}
            if bytes(choice.get("text", _NULL)) in {b"null", b'""'}:
                return []
            read = (await upstream.post("/tokenize", _ENCODER.encode(asked), headers)).json()
            if not isinstance(read, dict) or not isinstance(read.get("tokens"), list):
                raise EngineError("/tokenize cannot read the text before the stop string; the tokens are recorded")
            return list(read["tokens"])
        ended = bytes(choice.get("finish_reason", _NULL)) == b'"stop"' and not shown
        return tokens[:-1] if ended else tokens

    async def _ask(self, upstream: Answers, path: str, body: bytes, headers: CIMultiDict[str] | None) -> EngineResponse:
        """Ask who parses; a harness's own headers go to its engine only."""
        if self._parser is None:
            return await upstream.post(path, body, headers)
        parser = self._parser
        return await until_answered(lambda: parser.post(path, body))  # parsing twice does no harm

    async def question(self, upstream: Answers, body: Mapping[str, Any], prompt: list[int]) -> EngineResponse:
        """Put a small question of our own, a chat request, with the ids of its prompt.

        Raises:
            EngineError: nobody answers.
        """
        fields = {name: Raw(_ENCODER.encode(value)) for name, value in body.items()}
        answer = await upstream.post(PATH, written(fields, ids.extended((), ids.pack(prompt)), Guide()))
        if answer.status != _OK:
            return answer
        made, why, passing = await self.parsed(upstream, fields, answer.body)
        return EngineResponse(_UNAVAILABLE if passing else _BAD_GATEWAY, why.encode()) if why else EngineResponse(answer.status, made)

    async def says(self, upstream: Answers, asked: Mapping[str, Any], prompt: list[int], reply: list[int]) -> Reply:
        """Have a reply of known ids parsed, as one that the limit ended.

        Raises:
            EngineError: nobody answers, or derender refuses.
        """
        fields = {name: Raw(_ENCODER.encode(value)) for name, value in asked.items()}
        choice = {"index": 0, "text": "", "token_ids": reply, "prompt_token_ids": prompt, "finish_reason": "length"}
        made, why, passing = await self.parsed(upstream, fields, _ENCODER.encode({"choices": [choice]}))
        if why:
            raise EngineError(why, reached=not passing)
        said = Reply()
        said.take(made)
        return said


class Completions(Vllm):
    """See `driver.Driver`."""

    name = "completions"
    how = "prompts of /v1/completions, parsed by derender"

    def __init__(self, parser: Upstream | None = None) -> None:
        """Set up a driver; `parser` answers derender, the engine itself if it is `None`."""
        super().__init__(streams=False)
        self.detour = TokenPrompts(parser)

    def supplied(self, asked: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.supplied`."""
        del reply
        return {"messages": [Raw(asked)], "prompt_token_ids": prompt}


def written(fields: Mapping[str, Raw], fragment: ids.Pieces, guide: Guide) -> bytes:
    """Write a chat request as one for completions on a prompt of these ids (`b"1,2,3"`).

    A call that names no limit gets the guide's: of completions it would be 16 tokens, even for `null`.
    """
    body: dict[str, Any] = {name: value for name, value in fields.items() if name not in _OF_CHAT}
    body["max_tokens"] = next((fields[name] for name in _LIMITS if _there(fields, name)), guide.limit)
    if bytes(fields.get("logprobs", _NULL)) == b"true":
        most = fields.get("top_logprobs", _NULL)
        body["logprobs"] = most if bytes(most) != b"null" else 0
    if guide.outputs is not None:
        body["structured_outputs"] = guide.outputs
    body |= {"return_token_ids": True, "skip_special_tokens": False}
    return b"".join((memoryview(_ENCODER.encode(body))[:-1], b',"prompt":[', *fragment, b"]}"))


def _there(fields: Mapping[str, Raw], name: str) -> bool:
    return bytes(fields.get(name, _NULL)) not in _NOTHING


def _as_chat(
    said: dict[str, Raw],
    choices: list[dict[str, Raw]],
    messages: list[dict[str, Any]],
    fields: Mapping[str, Raw],
    why: str,
) -> bytes:
    """Write the answer of completions as a chat completion with these messages; with an error if there are none: `why`."""
    several = bytes(fields.get("parallel_tool_calls", _TRUE)) not in {b"false", b"null"}
    named = bytes(fields.get("tool_choice", _NULL)).startswith(b"{")
    most = msgspec.json.decode(fields.get("top_logprobs", _NULL)) or 0
    made: list[dict[str, Any]] = []
    for choice, message in zip(choices, messages, strict=True):
        others = {name: raw for name, raw in choice.items() if name not in {"text", "prompt_token_ids", "prompt_logprobs", "logprobs"}}
        if message.get("tool_calls"):
            if not several:
                message["tool_calls"] = message["tool_calls"][:1]
            if not named and bytes(others.get("finish_reason", _NULL)) != b'"abort"':
                others["finish_reason"] = Raw(b'"tool_calls"')
        made.append({**others, "message": message, "logprobs": _logprobs(choice.get("logprobs", _NULL), most)})
    body: dict[str, Any] = {
        **said,
        "object": "chat.completion",
        "choices": made,
        "prompt_token_ids": choices[0].get("prompt_token_ids", _NULL),
    }
    if bytes(said.get("id", _NULL)).startswith(b'"cmpl-'):
        body["id"] = Raw(b'"chat' + bytes(said["id"])[1:])
    if bytes(choices[0].get("prompt_logprobs", _NULL)) != b"null":
        body["prompt_logprobs"] = choices[0]["prompt_logprobs"]
    if why:
        body["error"] = {"message": why, "type": "upstream_error", "code": _BAD_GATEWAY}
    return _ENCODER.encode(body)


def _logprobs(raw: Raw, most: int) -> dict[str, Any] | None:
    """Write a text completion's log probabilities as those of a chat, with up to `most` others for each token (-1: all there are)."""
    told = msgspec.json.decode(raw)
    if not told:
        return None
    others = told.get("top_logprobs") or [None] * len(told["tokens"])
    return {
        "content": [
            {**_entry(token, value), "top_logprobs": [_entry(*one) for one in list((top or {}).items())[: most if most >= 0 else None]]}
            for token, value, top in zip(told["tokens"], told["token_logprobs"], others, strict=False)
        ]
    }


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "surrogatepass"))}
