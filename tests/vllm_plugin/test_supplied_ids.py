"""Which ids a request may supply, and how others are refused."""

import pytest

from tests.vllm_plugin.kit import MAX_MODEL_LEN, BadRequestError, Request, Server, TokenizeParams
from tokencache.dialects.chat.vocabulary import _MEDIA_MEMBERS as MEMBERS_OF_THE_PROXY
from tokencache_vllm.supplied_ids import _MEDIA_MEMBERS, take

HI = [{"role": "user", "content": "Hi."}]
TALK = [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Well?"}]


@pytest.fixture
def server():
    return Server()


def whole(ids, **more):
    return {"kv_transfer_params": {"prompt_token_ids": ids, **more}}


async def test_a_whole_prompt_replaces_the_messages(server):
    assert await server.prompt(HI, **whole([5, 6, 7])) == [5, 6, 7]
    assert server.online.renderer.rendered == 0
    assert server.online.seen == [("parser", {}, None)]


async def test_the_conversation_is_still_known(server):
    """vLLM up to 0.24 numbers Kimi's calls by those in the conversation (`get_history_tool_calls_cnt`)."""
    said, _ = await server.online.preprocess_chat(Request(**whole([5])), TALK, None, "auto", None)
    assert said == TALK


async def test_connectors_get_their_own_members_and_no_ids(server):
    await server.prompt(HI, **whole([5], do_remote_prefill=True))
    await server.prompt(TALK, vllm_xargs={"required_prefix_token_ids": [5], "other": 1})
    assert server.online.seen == [("parser", {"do_remote_prefill": True}, None), ("parser", None, {"other": 1})]


async def test_the_rest_of_a_request_is_rendered(server):
    """Later prompts of a request (tool loops of Responses) are not the supplied one."""
    request = Request(required_prefix_token_ids=[5], kv_transfer_params={})
    assert take(request).ids == [5]
    assert take(request) is None


async def test_without_ids_vllm_renders_as_usual(server):
    rendered = server.words.encode(server.lab.text(HI, None, generation=True))
    for fields in (
        {},
        {"kv_transfer_params": {"x": 1}},
        whole(None),
        {"required_prefix_token_ids": None},
        {"required_prefix_token_ids": []},
    ):
        assert await server.prompt(HI, tools=False, **fields) == rendered


@pytest.mark.parametrize("ids", [[], "5", {"a": 1}, [1.0], [True], [-1], ["5"], 7, [[5]]], ids=str)
@pytest.mark.parametrize("name", ["prompt_token_ids", "required_prefix_token_ids"])
async def test_anything_but_a_list_of_ids_is_refused(server, name, ids):
    if name == "required_prefix_token_ids" and ids == []:
        return  # nothing to do
    with pytest.raises(BadRequestError, match=f"`kv_transfer_params.{name}` must be .* of non-negative integers") as refused:
        await server.prompt(TALK, kv_transfer_params={name: ids})
    assert refused.value.parameter == f"kv_transfer_params.{name}"


async def test_ids_out_of_vocabulary(server):
    last = server.online.renderer.tokenizer.max_token_id
    assert await server.prompt(HI, **whole([last])) == [last]
    with pytest.raises(BadRequestError, match="out of vocabulary"):
        await server.prompt(HI, **whole([last + 1]))
    with pytest.raises(BadRequestError, match="out of vocabulary"):
        await server.prompt(TALK, required_prefix_token_ids=[last + 1])


async def test_a_prompt_must_leave_room_for_one_token(server):
    assert len(await server.prompt(HI, **whole([5] * (MAX_MODEL_LEN - 1)))) == MAX_MODEL_LEN - 1
    with pytest.raises(BadRequestError, match=f"maximum context length is {MAX_MODEL_LEN}"):
        await server.prompt(HI, **whole([5] * MAX_MODEL_LEN))
    with pytest.raises(BadRequestError, match="maximum context length"):  # the prefix fits, what follows does not
        await server.prompt(TALK, required_prefix_token_ids=[5] * (MAX_MODEL_LEN - 3))
    with pytest.raises(BadRequestError, match="maximum context length"):  # nor with the completion that was asked for
        await server.prompt(TALK, required_prefix_token_ids=[5] * 3000, tok=TokenizeParams(max_output_tokens=2000))


async def test_a_long_text_with_a_short_prefix(server):
    """The rendering is not the prompt: only what is sent has to fit."""
    talk = [{"role": "user", "content": "word " * 5000}, *TALK[1:]]
    assert (await server.prompt(talk, required_prefix_token_ids=[5, 6]))[:2] == [5, 6]
    with pytest.raises(BadRequestError, match="maximum context length"):
        await server.prompt(talk)


def test_proxy_and_plugin_know_the_same_media():
    """The plugin cannot import the proxy's list: it runs within vLLM."""
    assert _MEDIA_MEMBERS == MEMBERS_OF_THE_PROXY


MEDIA = [
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "text", "text": "x", "image_url": "y"},
    {"type": "text", "text": "x", "video_embeds": None},
    {"type": "input_audio", "input_audio": {}},
    {"type": "something-new"},
    {"type": 5},
]


@pytest.mark.parametrize("part", MEDIA, ids=str)
@pytest.mark.parametrize("fields", [whole([5]), {"required_prefix_token_ids": [5]}], ids=["prompt", "prefix"])
async def test_media_is_refused(server, part, fields):
    talk = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}, *TALK[1:]]
    fields = {name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()}
    with pytest.raises(BadRequestError, match="content that is not text"):
        await server.prompt(talk, **fields)


async def test_text_in_parts_and_read_once_iterators_are_text(server):
    """Pydantic returns some members of a message as one-shot iterators; here they are rendered several times."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    talk = [
        {"role": "user", "content": iter([{"type": "text", "text": "x"}])},
        {"role": "assistant", "content": None, "tool_calls": iter(calls)},
    ]
    talk.append({"role": "tool", "tool_call_id": "1", "content": "ok"})
    ids = await server.prompt(talk, required_prefix_token_ids=[5])
    assert "ok" in server.words.decode(ids)
    assert "</tool_call>" not in server.words.decode(ids)


async def test_two_members_must_not_contradict_each_other(server):
    with pytest.raises(BadRequestError, match="cannot both be given"):
        await server.prompt(TALK, **whole([5]), required_prefix_token_ids=[5])
    with pytest.raises(BadRequestError, match="given twice with different ids"):
        await server.prompt(TALK, vllm_xargs={"required_prefix_token_ids": [6]}, required_prefix_token_ids=[5])
    same = await server.prompt(TALK, vllm_xargs={"required_prefix_token_ids": [5]}, required_prefix_token_ids=[5])
    assert same[0] == 5


async def test_echo_and_truncation_contradict_exact_ids(server):
    with pytest.raises(BadRequestError, match="echo"):
        await server.prompt(HI, **whole([5]), echo=True)
    with pytest.raises(BadRequestError, match="truncate"):
        await server.prompt(TALK, required_prefix_token_ids=[5], tok=TokenizeParams(truncate_prompt_tokens=50))
