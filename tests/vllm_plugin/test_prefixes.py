"""Prompts whose beginning is named by a hash, in a small stand-in for vLLM 0.32."""

import base64
import functools
import hashlib
import logging
import sys
import types

import pytest

from tests.vllm_plugin.kit import BadRequestError, Renderer
from tokencache.core import ids as core_ids
from tokencache_vllm import entry, packed_replies, prefixes
from tokencache_vllm.kept_prefixes import KeptPrefixes
from tokencache_vllm.patch import UnknownVllmError
from tokencache_vllm.prefixes import MEMBER, MISS_HEADER, PROMPT_HEADER, patch_prefixes, take_named_prompt
from tokencache_vllm.response_headers import ResponseHeaders
from tokencache_vllm.supplied_ids import InvalidIdsError

RENDERED = [1, 2, 3]
REPLY = [50, 51, 52, 53]
LOGPROBS = [-0.5, -20000.0, None, -0.1]
FLOAT32 = -0.10000000149011612
ANSWERS = (
    *("ChatCompletionResponse", "ChatCompletionStreamResponse"),
    *("ChatCompletionResponseChoice", "ChatCompletionResponseStreamChoice"),
)
DELTA, FINAL_ONLY = "delta", "final"


def sha256(tokens):
    return hashlib.sha256(core_ids.pack(tokens)).hexdigest()


def tail(tokens):
    return base64.b64encode(core_ids.pack(tokens)).decode()


def named(prefix, more, **members):
    return {"hash": sha256(prefix), "length": len(prefix), "tail": tail(more), **members}


@functools.wraps(Renderer.preprocess_chat)
async def preprocess_chat(self, request, messages, *_rest, **_named):
    """As vLLM's: supplied ids are the prompt, unless messages have media. A parser reads the prompt (0.33)."""
    ids = (request.kv_transfer_params or {}).pop("prompt_token_ids", None)
    made = self.rendering.tokens_input(RENDERED if ids is None or messages == ["media"] else ids, cache_salt="salt")
    self.parsed.append(list(made["prompt_token_ids"]))
    return [], [made]


def tokens_input(prompt_token_ids, *, prompt=None, cache_salt=None):
    return {"type": "token", "prompt_token_ids": prompt_token_ids, "cache_salt": cache_salt}


def validate_token_ids(self, token_ids, *, parameter=None):
    self.checked.append(list(token_ids))


class Engine:
    """vLLM's engine client; it samples `REPLY`."""

    def __init__(self):
        self.prompts, self.checked, self.closed = [], [], 0

    async def generate(self, prompt, sampling_params, request_id):
        self.prompts.append(prompt["prompt_token_ids"])
        parts = [REPLY[:1], [], REPLY[1:]] if sampling_params.output_kind == DELTA else [REPLY]
        try:
            for at, part in enumerate(parts):
                reason = "stop" if at == len(parts) - 1 else None
                choice = types.SimpleNamespace(index=0, token_ids=part, finish_reason=reason, routed_experts="many")
                yield types.SimpleNamespace(prompt_token_ids=self.prompts[-1], outputs=[choice])
        finally:
            self.closed += 1


class Serving:
    """vLLM's handler: log probabilities become objects."""

    def _create_chat_logprobs(  # noqa: PLR0917 - vLLM's
        self,
        token_ids,
        top_logprobs,
        tokenizer,
        num_output_top_logprobs=None,
        logprob_token_ids=None,
        return_as_token_id=None,
    ):
        return {
            "content": [{"logprob": step[token].logprob if step else None} for token, step in zip(token_ids, top_logprobs, strict=True)]
        }


class Server:
    """A patched vLLM 0.32 with an ASGI application."""

    def __init__(self, max_bytes=2**20, preprocess=preprocess_chat):
        self.engine = Engine()
        self.online = type("OnlineRenderer", (), {"preprocess_chat": preprocess, "parsed": []})
        self.online.rendering = types.SimpleNamespace(OnlineRenderer=self.online, tokens_input=tokens_input)
        self.renderer = type("BaseRenderer", (), {"validate_token_ids": validate_token_ids, "checked": []})
        self.handler = type("OpenAIServingChat", (), dict(vars(Serving)))
        self.serving = types.SimpleNamespace(OpenAIServingChat=self.handler, **dict.fromkeys(ANSWERS, dict))
        self.modules = {
            "vllm.renderers.online_renderer": self.online.rendering,
            "vllm.entrypoints.openai.chat_completion.serving": self.serving,
            "vllm.renderers.base": types.SimpleNamespace(BaseRenderer=self.renderer),
            "vllm.exceptions": types.SimpleNamespace(VLLMValidationError=BadRequestError),
            "vllm.sampling_params": types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA=DELTA)),
        }
        self.max_bytes = max_bytes
        self.choices, self.experts = [], []
        self.last = None

    def patch(self):
        patch_prefixes(self.engine, self.max_bytes, self.modules.__getitem__)
        return self

    async def ask(
        self,
        member=None,
        *,
        messages=(),
        stream=False,
        leave=False,
        transfer=None,
        prompts=1,
        used=None,
        **request,
    ):
        """The headers, and the answer's ids of the prompt or its error."""
        transfer = {**(transfer or {}), **({MEMBER: member} if member is not None else {})}
        body = types.SimpleNamespace(kv_transfer_params=transfer, messages=list(messages) or ["any"], **request)
        self.last, answers, sent = body, [], []

        async def application(_scope, _receive, send):
            try:
                for _ in range(prompts):
                    _, (engine_input,) = await self.online().preprocess_chat(body, list(messages), None, "auto", None)
            except BadRequestError as why:
                answers.append(why)
            else:
                params = types.SimpleNamespace(output_kind=DELTA if stream else FINAL_ONLY)
                self.renderer().validate_token_ids(engine_input["prompt_token_ids"])
                outputs = self.engine.generate(used or engine_input, params, "id")
                async for output in outputs:
                    make = self.serving.ChatCompletionStreamResponse if stream else self.serving.ChatCompletionResponse
                    answers.append(make(prompt_token_ids=output.prompt_token_ids, model="m"))
                    self.choices.append(self._choice(output.outputs[0], stream=stream))
                    self.experts.append(output.outputs[0].routed_experts)
                    if leave:
                        await outputs.aclose()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message):
            sent.append(message)

        await ResponseHeaders(application)({"type": "http"}, None, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        assert transfer.keys() <= {"connector"}, "no connector gets members of the plugin"
        if isinstance(answers[0], Exception):
            return headers, answers[0]
        packed = answers[0].get("tokencache")
        if packed is None:
            return headers, answers[0]["prompt_token_ids"]
        assert answers[0]["prompt_token_ids"] is None
        return headers, core_ids.unpack(base64.b64decode(packed["prompt"]))

    def _choice(self, output, *, stream):
        make = self.serving.ChatCompletionResponseStreamChoice if stream else self.serving.ChatCompletionResponseChoice
        chances = [LOGPROBS[REPLY.index(token)] for token in output.token_ids]
        steps = [
            None if chance is None else {token: types.SimpleNamespace(logprob=chance)}
            for token, chance in zip(output.token_ids, chances, strict=True)
        ]
        logprobs = self.handler()._create_chat_logprobs(output.token_ids, steps, None)
        return make(index=0, logprobs=logprobs, token_ids=output.token_ids)

    async def refusal(self, member, **request):
        headers, answer = await self.ask(member, **request)
        assert isinstance(answer, BadRequestError), answer
        assert answer.parameter == "kv_transfer_params.tokencache_prefix"
        assert PROMPT_HEADER not in headers
        return headers, str(answer)


@pytest.fixture
def server():
    return Server().patch()


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_is_named_by_the_one_before(server, stream):
    headers, echo = await server.ask({}, stream=stream)
    assert (headers, echo) == ({PROMPT_HEADER: sha256(RENDERED)}, RENDERED)
    prompt = RENDERED
    for turn in range(3):
        sent = [*prompt, *REPLY, 7, turn]
        headers, echo = await server.ask(named([*prompt, *REPLY], [7, turn]), stream=stream)
        assert (headers, echo) == ({PROMPT_HEADER: sha256(sent)}, None)
        assert server.engine.prompts[-1] == server.online.parsed[-1] == sent
        prompt = sent


async def test_the_whole_prompt_can_be_the_tail(server):
    headers, echo = await server.ask({"tail": tail([9, 8])})
    assert (headers, echo, server.engine.prompts) == ({PROMPT_HEADER: sha256([9, 8])}, None, [[9, 8]])
    await server.ask(named([9, 8, *REPLY], [1]))
    assert server.engine.prompts[-1] == [9, 8, *REPLY, 1]


async def test_the_ids_are_returned_on_request(server):
    for packed in (False, True):
        assert (await server.ask({"tail": tail([9, 8]), "echo": True, "packed": packed}))[1] == [9, 8]
        assert (await server.ask({"packed": packed}))[1] == RENDERED
        assert (await server.ask({"tail": tail([9, 8]), "packed": packed}))[1] is None


async def test_the_number_of_calls_stands_for_the_history(server):
    await server.ask({"tail": tail([9, 8]), "calls": 3})
    first, *rest = server.last.messages
    assert (first["role"], len(first["tool_calls"]), rest) == ("assistant", 3, ["any"])


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_are_packed_on_request(server, stream):
    await server.ask({"tail": tail([9, 8])}, stream=stream)
    assert all("tokencache" not in choice and choice["logprobs"]["content"] for choice in server.choices if choice["token_ids"])
    server.choices.clear()
    await server.ask({"tail": tail([9, 8]), "packed": True}, stream=stream)
    found = [choice.pop("tokencache") for choice in server.choices]
    assert all(choice == {"index": 0, "logprobs": None, "token_ids": None} for choice in server.choices)
    assert [token for one in found for token in core_ids.unpack(base64.b64decode(one["ids"]))] == REPLY
    logprobs = [value for one in found for value in core_ids.unpack_logprobs(base64.b64decode(one["logprobs"]))]
    assert logprobs == [-0.5, -9999.0, -9999.0, -0.1], "nothing is rounded"


async def test_routed_experts_are_returned_on_request(server):
    await server.ask()
    await server.ask({"tail": tail([9, 8])})
    await server.ask({"tail": tail([9, 8]), "experts": True})
    assert server.experts == ["many", None, "many"]


def test_log_probabilities_are_packed_as_float32_if_that_loses_nothing():
    assert packed_replies.pack_logprobs([]) == b""
    assert packed_replies.pack_logprobs([FLOAT32, -2.0])[:1] == b"f"
    assert packed_replies.pack_logprobs([-0.1])[:1] == b"d"
    for values in ([FLOAT32], [-0.1], [-9999.0]):
        assert core_ids.unpack_logprobs(packed_replies.pack_logprobs(values)) == values


async def test_a_prefix_that_is_not_there_is_a_miss_and_nothing_is_sampled(server):
    headers, why = await server.refusal(named([4, 4], [1]))
    assert headers == {MISS_HEADER: "miss"}
    assert "send the whole prompt" in why
    assert server.engine.prompts == []


async def test_a_prefix_that_had_to_leave_is_a_miss():
    server = Server(max_bytes=4 * (len(RENDERED) + len(REPLY))).patch()
    await server.ask({})
    await server.ask({"tail": tail([9, 8])})
    assert (await server.refusal(named([*RENDERED, *REPLY], [1])))[0] == {MISS_HEADER: "miss"}
    assert (await server.ask(named([9, 8, *REPLY], [1])))[0] == {PROMPT_HEADER: sha256([9, 8, *REPLY, 1])}


async def test_a_reply_that_was_cut_off_is_not_kept(server):
    await server.ask({}, stream=True, leave=True)
    assert server.engine.closed == 1, "vLLM's own generator is closed, which aborts the request"
    for known in (RENDERED, [*RENDERED, REPLY[0]], [*RENDERED, *REPLY]):
        assert (await server.refusal(named(known, [1])))[0] == {MISS_HEADER: "miss"}


async def test_a_wrong_cache_shows_in_the_hash(server, monkeypatch):
    await server.ask({})
    wrong = core_ids.pack([*RENDERED, *REPLY[:-1], 99])
    monkeypatch.setattr(KeptPrefixes, "find", lambda *_: wrong)
    headers, _ = await server.ask(named([*RENDERED, *REPLY], [1]))
    assert headers == {PROMPT_HEADER: sha256(server.engine.prompts[-1])}
    assert headers != {PROMPT_HEADER: sha256([*RENDERED, *REPLY, 1])}, "the client compares with its own hash"


async def test_the_hash_is_that_of_what_the_engine_gets(server):
    headers, _ = await server.ask({"tail": tail([9, 8])}, used={"prompt_token_ids": [9, 9]})
    assert headers == {PROMPT_HEADER: sha256([9, 9])}
    assert (await server.ask(named([9, 9, *REPLY], [1])))[0] == {PROMPT_HEADER: sha256([9, 9, *REPLY, 1])}


async def test_only_other_prompts_are_checked_as_a_whole(server):
    await server.ask({})
    await server.ask(named([*RENDERED, *REPLY], [7]))
    await server.ask({"tail": tail([9, 8])}, used={"prompt_token_ids": [9, 9]})
    await server.ask()
    assert server.renderer.checked == [RENDERED, RENDERED], "the first and the last"


async def test_a_request_without_the_member_is_vllms_own(server):
    assert await server.ask(transfer={"connector": 1}) == ({}, RENDERED)
    assert (await server.refusal(named([*RENDERED, *REPLY], [1])))[0] == {MISS_HEADER: "miss"}, "and is not kept"


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (["list"], "must be an object"),
        ({"ids": [1]}, "must be an object"),
        ({"tail": [1, 2]}, "base64"),
        ({"tail": "AQ=="}, "4 bytes"),
        ({"tail": "no base64!"}, "base64"),
        ({"hash": "xyz", "length": 1, "tail": tail([1])}, "hex"),
        ({"hash": "ab", "length": 1, "tail": tail([1])}, "SHA-256"),
        ({"hash": sha256([1]), "tail": tail([1])}, "SHA-256"),
        ({"length": 5, "tail": tail([1])}, "SHA-256"),
        ({"hash": sha256(RENDERED), "length": 3}, "at least one"),
        ({"length": -1, "tail": tail([1])}, "number of tokens"),
        ({"length": True, "tail": tail([1])}, "number of tokens"),
        ({"calls": -1, "tail": tail([1])}, "number of tool calls"),
        ({"tail": tail([1, -1])}, "negative"),
        ({"packed": 1, "tail": tail([1])}, "true or false"),
        ({"tail": tail([1]), "echo": 1}, "true or false"),
        (named([*RENDERED, *REPLY], [1], length=3), "has 7 tokens"),
    ],
)
async def test_what_is_not_as_described_is_refused(server, member, why):
    await server.ask({})
    headers, said = await server.refusal(member)
    assert why in said
    assert headers == {}
    assert len(server.engine.prompts) == 1


@pytest.mark.parametrize("member", ["echo", "use_beam_search", "truncate_prompt_tokens"])
async def test_members_that_contradict_are_refused(server, member):
    assert f"`{member}`" in (await server.refusal({"tail": tail([1])}, **{member: True}))[1]


@pytest.mark.parametrize("other", ["prompt_token_ids", "tokencache_prompt"])
async def test_another_prompt_is_refused(server, other):
    transfer = {other: [1]}
    request = types.SimpleNamespace(kv_transfer_params={**transfer, MEMBER: {"tail": tail([1])}})
    with pytest.raises(InvalidIdsError, match=other):
        take_named_prompt(request)


async def test_media_are_refused_and_so_is_what_vllm_would_render(server):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert "the messages have media" in (await server.refusal({"tail": tail([9])}, messages=[image]))[1]
    assert "vLLM renders" in (await server.refusal({"tail": tail([9])}, messages=["media"]))[1]
    assert server.engine.prompts == []


async def test_a_request_with_several_prompts_is_refused(server):
    assert "several" in (await server.refusal({"tail": tail([9])}, prompts=2))[1]
    assert server.engine.prompts == []
    assert await server.ask(prompts=2) == ({}, RENDERED)


async def test_without_the_middleware_nothing_is_rendered_in_its_place(server):
    request = types.SimpleNamespace(kv_transfer_params={MEMBER: {"tail": tail([9])}})
    with pytest.raises(BadRequestError, match="over HTTP"):
        await server.online().preprocess_chat(request, [], None, "auto", None)


async def _fewer(self, request, messages):
    return [], []


def test_unexpected_code_is_left_alone():
    server = Server(preprocess=_fewer)
    with pytest.raises(UnknownVllmError, match="OnlineRenderer"):
        server.patch()
    missing = Server()
    del missing.serving.ChatCompletionStreamResponse
    with pytest.raises(UnknownVllmError, match="as expected"):
        missing.patch()
    assert server.online.preprocess_chat is _fewer
    assert "generate" not in vars(server.engine) | vars(missing.engine)
    assert missing.online.preprocess_chat is preprocess_chat
    newer = Server()
    newer.online.rendering.tokens_input = lambda ids: {"prompt_token_ids": ids}
    with pytest.raises(UnknownVllmError, match="tokens_input"):
        newer.patch()
    other = Server()
    other.handler._create_chat_logprobs = _fewer
    with pytest.raises(UnknownVllmError, match="_create_chat_logprobs"):
        other.patch()


async def test_an_older_vllm_checks_all_ids_itself():
    """0.27 to 0.31 have no method for it."""
    older = Server()
    del older.renderer.validate_token_ids
    older.patch()
    assert not hasattr(older.renderer, "validate_token_ids")
    assert "generate" in vars(older.engine)


async def test_it_is_patched_once(server):
    before = server.engine.generate
    server.patch()
    assert server.engine.generate is before


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "268435456 bytes kept"), ("4096", "4096 bytes kept"), ("0", "are off"), ("1GB", "NOT ACTIVE: TOKENCACHE_PRE")],
)
@pytest.mark.parametrize("version", ["0.27.0", "0.31.2", "0.32.0", "0.33.0"])
async def test_the_endpoint_plugin_offers_it_and_logs_it(monkeypatch, caplog, given, said, *, version):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(entry, "patch_images", lambda _version: True)
    server = Server()
    monkeypatch.setattr(entry, "patch_detokenizer", lambda: None)
    monkeypatch.setattr(prefixes, "patch_prefixes", lambda engine, size: patch_prefixes(engine, size, server.modules.__getitem__))
    monkeypatch.delenv("TOKENCACHE_PREFIX_BYTES", raising=False)
    if given is not None:
        monkeypatch.setenv("TOKENCACHE_PREFIX_BYTES", given)
    await entry.EndpointPlugin().init_state(server.engine, None, None)
    assert said in caplog.messages[-1]
    assert ("generate" in vars(server.engine)) == ("kept" in said)


@pytest.mark.parametrize(("version", "engine"), [("0.32.0", None), ("0.26.0", object()), ("0.34.0", object())])
async def test_a_server_that_only_renders_and_other_versions_have_no_prefixes(monkeypatch, caplog, version, engine):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(entry, "patch_images", lambda _version: True)
    await entry.EndpointPlugin().init_state(engine, None, None)
    assert not any("prefix" in message for message in caplog.messages)
