"""The engine reads a request as the proxy does: what two readers could read differently is refused, or not exact."""

import json

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, echo, proxied, user
from tests.support.reading import read_chat, read_tokenize
from tokencache.dialects import text_completions
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.json_io import fields_of, refuse_repeated
from tokencache.engine.drivers.vllm import members_with_ids
from tokencache.errors import HarnessError
from tokencache.proxy.continuation import reason_against, remaining_fields
from tokencache.testing import Fault, SimulatedEngine

ASK = '"model": "sim", "messages": [{"role": "user", "content": "EPISODE:talk"}]'
IDS = "[7, 7, 7, 7]"


async def sent(rig, body, path=CHAT):
    headers = {HEADER: "s", "Content-Type": "application/json"}
    async with rig.http.post(rig.url + path, data=body.encode(), headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    "members",
    [
        f'"prompt_token_ids": {IDS}, "prompt_token_ids": null',
        f'"kv_transfer_params": {{"prompt_token_ids": {IDS}, "prompt_token_ids": null}}',
        f'"kv_transfer_params": {{"prompt_token_ids": null, "prompt_token_ids": {IDS}}}',
        f'"kv_transfer_params": {{"prompt_token_ids": {IDS}, "prompt\\u005ftoken_ids": null}}',
        f'"kv_transfer_params": {{"a": {{"b": {IDS}, "b": null}}}}',
        f'"kv_transfer_params": {{"prompt_token_ids": {IDS}}}, "kv_transfer_params": null',
        f'"kv\\u005ftransfer_params": {{"prompt_token_ids": {IDS}}}, "kv_transfer_params": null',
        f'"vllm_xargs": {{"required_prefix_token_ids": {IDS}, "required_prefix_token_ids": null}}',
        f'"required_prefix_token_ids": {IDS}, "required_prefix_token_ids": null',
        '"stream": false, "stream": true',
        '"stream": true, "stream_options": {"include_usage": true, "include_usage": false}',
        '"chat_template_kwargs": {"enable_thinking": true, "enable_thinking": false}',
        '"messages": [{"role": "user", "content": "another"}]',
        '"max_tokens": NaN, "model": "other"',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_member_that_is_given_twice_is_refused(members, path):
    async with proxied() as rig:
        rig.engine.requests.clear()
        for body in (f"{{{ASK}, {members}}}", f"{{{members}, {ASK}}}"):
            status, text = await sent(rig, body, path)
            assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error"), text
            assert "is given twice" in text
        assert not [request for request in rig.engine.requests if IDS in json.dumps(request)]


TRANSLATED = {
    "/v1/messages": '"model": "sim", "max_tokens": 50, "messages": [{"role": "user", "content": "EPISODE:talk"}]',
    "/v1/messages/count_tokens": '"model": "sim", "messages": [{"role": "user", "content": "EPISODE:talk"}]',
    "/v1/responses": '"model": "sim", "input": "EPISODE:talk"',
    "/v1beta/models/sim:generateContent": '"contents": [{"role": "user", "parts": [{"text": "EPISODE:talk"}]}]',
    "/v1/completions": '"model": "sim", "prompt": "EPISODE:talk"',
}


@pytest.mark.parametrize("path", TRANSLATED)
@pytest.mark.parametrize(
    "members",
    [
        f'"kv_transfer_params": {{"prompt_token_ids": {IDS}, "prompt_token_ids": null}}',
        f'"vllm_xargs": {{"a": {{"b": {IDS}, "\\u0062": null}}}}',
        f'"prompt_token_ids": {IDS}, "prompt\\u005ftoken_ids": null',
    ],
)
async def test_in_every_dialect(path, members):
    async with proxied() as rig:
        for body in (f"{{{TRANSLATED[path]}, {members}}}", f"{{{members}, {TRANSLATED[path]}}}"):
            status, text = await sent(rig, body, path)
            assert (status, "is given twice" in text) == (400, True), text
        assert not rig.ground_truth()


@pytest.mark.parametrize("members", ['"stream": false, "stream": false', '"model": "sim"', '"messages": []'])
async def test_it_is_refused_after_a_known_history_too(members):
    """The rest of a body whose beginning is known is parsed alone."""
    async with proxied() as rig:
        message = await rig.say("s", [user("EPISODE:talk")])
        history = json.dumps([user("EPISODE:talk"), echo(message), user("go on")])
        status, text = await sent(rig, f'{{"model": "sim", "messages": {history}, {members}}}')
        assert (status, "is given twice" in text) == (400, True), text


@pytest.mark.parametrize("extras", ["kv_transfer_params", "vllm_xargs"])
@pytest.mark.parametrize("name", ["prompt_token_ids", "tokencache_prompt", "tokencache_prefix", "required_prefix_token_ids"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_ids_of_the_clients_own_are_refused_wherever_an_engine_reads_them(extras, name, path):
    async with proxied() as rig:
        status, text = await sent(rig, f'{{{TRANSLATED.get(path, ASK)}, "{extras}": {{"{name}": {IDS}}}}}', path)
        assert (status, json.loads(text)["error"]["param"]) == (400, f"{extras}.{name}")


async def test_ids_on_a_message_whose_name_is_escaped_never_reach_the_engine():
    async with proxied() as rig:
        body = ASK.replace('"content"', f'"prompt_token\\u005fids": {IDS}, "content"')
        assert (await sent(rig, f"{{{body}}}"))[0] == 200
        assert IDS not in json.dumps(rig.engine.requests)
        body = ASK.replace('"content"', f'"prompt_token_ids": {IDS}, "prompt_token_ids": null, "content"')
        assert (await sent(rig, f"{{{body}}}"))[0] == 400


@pytest.mark.parametrize("member", ["image_url", "video_url", "input_audio", "prompt_embeds", "image_pil"])
@pytest.mark.parametrize("value", [None, {"url": "data:image/png;base64,AAAA"}])
async def test_a_text_with_a_member_of_media_is_not_only_text(member, value):
    """vLLM ignores supplied ids if a part has such a member, even if it is null: so the proxy supplies none."""
    part = {"type": "text", "text": "EPISODE:talk", member: value}
    async with proxied() as rig:
        message = await rig.say("s", [{"role": "user", "content": [part]}])
        await rig.say("s", [{"role": "user", "content": [part]}, echo(message), user("go on")])
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("plain", "media"), ("plain", "media")]


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        ' { "a" : 1 , "b":{"x":"}"} }\n',
        '{"a\\u005f": "1,\\"b\\": 2", "b": [1, {"a": 1}, {"a": 2}], "c": 12, "d": 1}',
        '{"a": NaN, "b": {"a": 1}}',
        json.dumps({f"member {n}": n for n in range(100)}),
    ],
)
def test_an_object_without_repeated_members(body):
    assert list(fields_of(body.encode())) == list(json.loads(body))
    refuse_repeated(body.encode())


@pytest.mark.parametrize(
    "body",
    [
        '{"a": 1, "a": 1}',
        '{"a": 12, "a": 1}',
        '{"a": 1, "b": 2, "\\u0061": 3}',
        '{"a": "1,\\"b\\": 2", "b": 2, "a": 1}',
        '{"a": NaN, "a": 1}',
    ],
)
def test_an_object_with_one(body):
    with pytest.raises(HarnessError, match="'a' is given twice"):
        fields_of(body.encode())


def chat(members):
    return read_chat(f"{{{ASK}, {members}}}".encode(), IncrementalParser())


@pytest.mark.parametrize("value", ["true", "1", "1.0"])
async def test_a_chat_reply_that_beam_search_selected_is_a_hole(value):
    async with proxied() as rig:
        rig.engine.faults.append(Fault.answer(200, '{"choices": []}', path=CHAT))
        assert (await sent(rig, f'{{{ASK}, "use_beam_search": {value}}}'))[0] == 200
        info = await rig.info()
        assert [incident["kind"] for incident in info["incidents"]] == ["unrecorded-route"]
        assert not info["complete"]
        assert not await rig.turns()


@pytest.mark.parametrize("value", ["-0", "0.0", "-0.0", "0e0", "null"])
async def test_log_probabilities_are_requested_with_any_zero(value):
    async with proxied() as rig:
        assert (await sent(rig, f'{{{ASK}, "top_logprobs": {value}}}'))[0] == 200
        assert rig.engine.requests[-1]["logprobs"] is True
        assert (await rig.check())["complete"]


@pytest.mark.parametrize("budget", ['"5"', "5.0", "true", "[]", '"x"'])
async def test_a_thinking_budget_that_vllm_may_read_otherwise_is_refused(budget):
    """vLLM 0.32 refuses these; an engine that read them as 5 would force ids that no record shows."""
    async with proxied() as rig:
        status, text = await sent(rig, f'{{{ASK}, "thinking_token_budget": {budget}}}')
        assert (status, json.loads(text)["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("options", ["NaN", "1e999", '{"a": NaN}', '{"a": "\\ud800"}', '{"include_usage": "off"}'])
async def test_options_of_a_stream_that_cannot_be_read_are_refused(options):
    async with proxied() as rig:
        status, text = await sent(rig, f'{{{ASK}, "stream": true, "stream_options": {options}}}')
        assert (status, json.loads(text)["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "member", ['"best_of": [1]', '"best_of": {}', '"tool_choice": []', '"function_call": {}', '"repetition_detection": {}']
)
async def test_a_reply_is_not_continued_with_a_value_that_is_not_known_to_be_harmless(member):
    name = member.split('"')[1]
    assert reason_against(chat(member).fields) == f"{name} does not survive a cut"
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7, derenders=True)) as rig:
        assert (await sent(rig, f"{{{ASK}, {member}}}"))[0] in {200, 400}


@pytest.mark.parametrize("limit", ["9", '"9"', "9.0", "9e0"])
def test_a_continued_reply_has_what_is_left_of_the_limit(limit):
    fields = chat(f'"max_tokens": {limit}, "min_tokens": {limit}, "parallel_tool_calls": 0').fields
    assert reason_against(fields) == ""
    rest = remaining_fields(fields, 4, 1)
    assert (bytes(rest["max_tokens"]), bytes(rest["min_tokens"])) == (b"5", b"5")
    assert bytes(fields["parallel_tool_calls"]) == b"false"


def test_log_probabilities_of_some_ids_are_left_to_the_engine_to_refuse():
    """vLLM refuses `logprob_token_ids` without `logprobs`."""
    assert "logprobs" not in members_with_ids(chat('"logprob_token_ids": [1]'))
    assert "logprobs" in members_with_ids(chat('"logprob_token_ids": [ ]'))
    text = text_completions.read(b'{"prompt": "a", "logprob_token_ids": [1]}')
    assert b"logprobs" not in text_completions.for_engine(text).replace(b'"logprob_', b"")


def test_a_tool_choice_is_read_in_any_spelling():
    tools = '"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": '
    assert [chat(tools + value).args.digest for value in ('"none"', '"n\\u006fne"')] == [chat(tools + '"none"').args.digest] * 2
    assert chat(tools + '"auto"').args.digest != chat(tools + '"none"').args.digest


@pytest.mark.parametrize("member", ['"chat_template_kwargs": {"a": %s}', '"tools": [{"a": %s}]', '"mm_processor_kwargs": {"a": %s}'])
def test_another_spelling_of_a_number_is_another_context(member):
    """A template writes 1.0 and 1 differently."""
    chains = [chat(member % value).chain for value in ("1", "1.0", "true")]
    assert len({*chains}) == 3
    assert chat(member % "1").chain == chat(member.replace(" ", "  ") % "1").chain


def test_empty_texts_are_left_out_of_a_content():
    """As vLLM does it (0.32, `_parse_chat_message_content_parts`)."""
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    assert read_message({"role": "assistant", "content": parts}).content == "a\nb"
    assert read_message({"role": "assistant", "content": ["", ""]}).content == ""


def test_reasoning_is_read_from_the_member_that_the_engine_reads():
    both = {"role": "assistant", "content": "a", "reasoning": "", "reasoning_content": "thought"}
    assert read_message(both).reasoning == ""
    assert read_message(both | {"reasoning": None}).reasoning == "thought"


def test_the_engine_tokenizes_a_body_with_a_prompt():
    assert read_tokenize(f'{{{ASK}, "prompt": "a"}}'.encode(), IncrementalParser()) is None


@pytest.mark.parametrize("prompt", ['["1", 2]', "[1, 2.0]", "[1.0, 2.0]", "[true]", '["a", [1]]', "[]", "[null]"])
async def test_a_list_of_prompts_that_may_be_one_prompt_is_refused(prompt):
    async with proxied() as rig:
        status, text = await sent(rig, f'{{"model": "sim", "prompt": {prompt}}}', "/v1/completions")
        assert (status, json.loads(text)["error"]["param"]) == (400, "prompt")


async def test_embeddings_of_no_letters_are_embeddings():
    async with proxied() as rig:
        rig.engine.faults.append(Fault.answer(200, '{"choices": []}', path="/v1/completions"))
        await sent(rig, '{"model": "sim", "prompt": "a", "prompt_embeds": ""}', "/v1/completions")
        assert [incident["kind"] for incident in (await rig.info())["incidents"]] == ["unrecorded-route"]
