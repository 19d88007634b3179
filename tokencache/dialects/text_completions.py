"""Parses text completions (`/v1/completions`) and encodes their replies. They are relayed in their own format, and recorded.

Nothing is translated or spliced: the prompt is a text, or ids from the client. The proxy also requests ids and log probabilities, and
removes them from the client's reply. A request may have several prompts; choice `i` then answers prompt `i // n` (vLLM 0.32,
`completion/serving.py`), and each choice has its own prompt's ids.

A request that cannot be recorded truthfully is passed on unchanged and leaves a hole (`unrecorded`):

* `echo`: vLLM echoes the prompt as text only if no ids are requested, and returns the log probabilities of prompt and reply as one list.
  So requesting ids would change the reply (vLLM 0.32, `needs_detokenization`);
* `use_beam_search`: the reply was selected, not sampled;
* `prompt_embeds`: the prompt has no tokens.

`suffix` (which vLLM 0.32 accepts for fill-in-the-middle models), `best_of` (which it ignores) and `prompt_logprobs` need no special case:
the engine still returns the ids of the prompt.
"""

from collections.abc import Callable

import msgspec

from tokencache.core.reasons import Reason
from tokencache.dialects.chat.rendering import render_args
from tokencache.dialects.chat.reply import PassthroughEncoder, WrittenReply
from tokencache.dialects.chat.request import ChatCall, refuse_prompts
from tokencache.dialects.chat.sampling import BEAM_SEARCH, is_search
from tokencache.dialects.chat.scalars import normalize
from tokencache.dialects.chat.vocabulary import resolve_model
from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS, TRUE, fields_of, member, value_of
from tokencache.dialects.sse import event_of
from tokencache.dialects.stream_usage import with_usage
from tokencache.errors import HarnessError

Raw = msgspec.Raw

_ZERO = Raw(b"0")


def read(body: bytes, *, served: Callable[[str], str] = str) -> ChatCall:
    """Parse a request's body as a chat call whose history is not matched; `served` maps the client's model name to a served model.

    Returns:
        The call. Its number of choices is `n` for each prompt.

    Raises:
        HarnessError: it is not a JSON object, or has ids besides its prompt; or a member that is used here stands twice, or has the wrong
            type or an unclear value (`chat.scalars`).
    """
    fields = fields_of(body)
    refuse_prompts(fields)
    normalize(fields, chat=False)
    model = resolve_model(fields, served)
    return ChatCall(
        fields=fields,
        raw_messages=[],
        conversation=None,
        args=render_args({}, None),
        model=model,
        stream=member(fields, "stream", (bool,), False),
        n=member(fields, "n", (int,), 1) * _number_of_prompts(fields),
        shows_ids=member(fields, "return_token_ids", (bool,), False),
        shows_logprobs=member(fields, "logprobs", (int,), None) is not None,
        shows_reasoning=True,
        plain=Reason.TEXT_COMPLETION,
    )


def unrecorded(fields: dict[str, Raw]) -> str:
    """Return why the reply to a request (its raw members) cannot be recorded, or `""`.

    Raises:
        HarnessError: a member has the wrong type.
    """
    causes = {
        "echo": member(fields, "echo", (bool,), False),
        BEAM_SEARCH: is_search(fields),
        "prompt-embeds": member(fields, "prompt_embeds", (str, list), None) is not None,
    }
    return next((name for name, present in causes.items() if present), "")


def for_engine(call: ChatCall) -> bytes:
    """Write the request for the engine; it asks for ids and log probabilities."""
    asked = {"return_token_ids": TRUE, "return_weight_versions": TRUE}
    if not call.shows_logprobs and not value_of(call.fields.get("logprob_token_ids", NULL)):
        asked["logprobs"] = _ZERO  # otherwise leave it to the engine to refuse `logprob_token_ids` without `logprobs`
    fields = {**call.fields, **asked}
    return msgspec.json.encode(with_usage(fields) if call.stream else fields)


def _number_of_prompts(fields: dict[str, Raw]) -> int:
    """Count the prompts in a request's members.

    vLLM takes a list for one prompt of ids if each item can be read as an id (`["1", 2]`, `[1.0, true]`), so such lists are refused.

    Raises:
        HarnessError: the prompt is neither a text, nor ids, nor a list of texts or of lists.
    """
    prompts = member(fields, "prompt", (str, list), "")
    kinds = {type(item) for item in prompts} if isinstance(prompts, list) else {int}
    if kinds == {int}:
        return 1
    if kinds not in ({str}, {list}):
        raise HarnessError("'prompt' must be a text, a list of token ids, or a list of either", param="prompt")
    return len(prompts)


def write_completion(reply: WrittenReply) -> bytes:
    """Write a whole text completion (JSON) with the members that vLLM 0.32 writes."""
    written = [
        {
            "index": one.position,
            "text": one.message.content or "",
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        for one in reply.choices
    ]
    members = {"id": f"cmpl-{reply.call}", "object": "text_completion", "created": int(reply.created), "model": reply.model}
    return msgspec.json.encode({**members, "choices": written, "usage": reply.usage})


class TextReplyEncoder(PassthroughEncoder):
    """Passes on the engine's own bytes, with `null` in place of members that the client did not request.

    Unlike in chat, no chunk exists only because ids were requested: vLLM sends a chunk for every step anyway (0.32).
    """

    def __init__(self, call: ChatCall) -> None:
        super().__init__(call.fields)
        hidden = [] if call.shows_ids else ["token_ids", "prompt_token_ids"]
        self._hidden = (*hidden, *([] if call.shows_logprobs else ["logprobs"]))

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`. A body that cannot be parsed is passed on."""
        return self._present(data)

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`."""
        del prompt_tokens
        shown = self._present(data)
        return self._usage.present(event if shown is data else event_of(shown), shown)

    def _present(self, data: bytes) -> bytes:
        if not self._hidden and not self.has_extras(data):
            return data
        try:
            fields = FIELDS.decode(data)
            choices = OBJECTS.decode(fields["choices"])
        except (ValueError, KeyError, RecursionError):
            return data
        for choice in choices:
            choice.update((name, NULL) for name in self._hidden if name in choice)
            self.hide_extras(choice)
        fields["choices"] = Raw(msgspec.json.encode(choices))
        return msgspec.json.encode(fields)
