"""The engine reads a request as the proxy does: what two readers could read differently is refused, or not exact."""

import json

import pytest

from tests.proxy.kit import CHAT, HEADER, echo, proxied, user
from tokencache.dialects.json_io import fields_of, refuse_repeated
from tokencache.errors import HarnessError

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
async def test_ids_of_the_clients_own_are_refused_wherever_an_engine_reads_them(extras, name):
    async with proxied() as rig:
        status, text = await sent(rig, f'{{{ASK}, "{extras}": {{"{name}": {IDS}}}}}')
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
