"""Chat completions: what the harness is shown of the engine's reply.

The engine is always asked for ids, log probabilities and reasoning. A harness that did not ask must see the bytes of a
direct call: the members that vLLM writes as `null` are set back to `null`, never taken away, and the chunks that exist
only because ids were asked for (`delta: {}`) are dropped (observed on vLLM 0.32.0; a direct client that asks for log
probabilities does get them).
"""

from collections.abc import Callable

import msgspec

from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.chat.plain import without_tokens
from tokencache.dialects.presenter import ExtraMembers, Presenter
from tokencache.dialects.sse import event_of

Raw = msgspec.Raw

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_NULL = Raw(b"null")
_ENCODER = msgspec.json.Encoder()


class ChatPresenter(Presenter):
    """The speaker of chat completions: shows the engine's own bytes, less what this harness did not ask for."""

    def __init__(self, call: ChatCall) -> None:
        self._prompt = call.shows_ids
        # vLLM itself keeps ids and log probabilities back where reasoning is not to be seen (0.26 and later).
        self._ids = call.shows_ids and call.shows_reasoning
        self._logprobs = call.shows_logprobs and call.shows_reasoning
        self._reasoning = call.shows_reasoning
        self._as_is = self._ids and self._logprobs
        self._extras = ExtraMembers(call.fields)

    def body(self, data: bytes) -> bytes:
        """See `Speaker.body`; what cannot be read is passed on as it is."""
        return data if self._shows_all(data) else self._present(data, "message") or data

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `Speaker.chunk`; nothing where a direct client would have got nothing."""
        del prompt_tokens
        shown = data if self._shows_all(data) else self._present(data, "delta")
        if shown is None:
            return b""
        return event if shown is data else event_of(shown)

    @property
    def unread(self) -> Callable[[bytes], bytes | None] | None:
        """What says most events without reading them (`plain`); `None` for who sees other than everybody."""
        hides = not (self._prompt or self._ids or self._logprobs) and self._reasoning
        return without_tokens if hides else None

    def _shows_all(self, data: bytes) -> bool:
        return self._as_is and not self._extras.found(data)

    def _present(self, data: bytes, said: str) -> bytes | None:
        try:
            fields = _FIELDS.decode(data)
            choices = _CHOICES.decode(fields["choices"])
        except (ValueError, KeyError, RecursionError):
            return data
        if not self._prompt and "prompt_token_ids" in fields:
            fields["prompt_token_ids"] = _NULL
        shown = [choice for choice in choices if self._choice(choice, said)]
        if choices and not shown:
            return None
        fields["choices"] = Raw(_ENCODER.encode(shown))
        return _ENCODER.encode(fields)

    def _choice(self, choice: dict[str, Raw], said: str) -> bool:
        """Hide in one choice what was not asked for; false if nothing would be left of it."""
        if not self._ids:
            for name in ("token_ids", "prompt_token_ids"):
                if name in choice and (name == "token_ids" or not self._prompt):
                    choice[name] = _NULL
        self._extras.hide(choice)
        if not self._logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL
        spoke = True
        if said in choice and not self._reasoning:
            spoke = self._hide_reasoning(choice, said)
        elif said == "delta" and bytes(choice.get("delta", _NULL)) == b"{}":
            spoke = self._ids or self._logprobs
        return spoke or bytes(choice.get("finish_reason", _NULL)) != b"null"

    @staticmethod
    def _hide_reasoning(choice: dict[str, Raw], said: str) -> bool:
        entry = _FIELDS.decode(choice[said])
        if said == "message":
            for name in ("reasoning", "reasoning_content"):
                if name in entry:
                    entry[name] = _NULL
        else:
            thought = entry.pop("reasoning", None) or entry.pop("reasoning_content", None)
            if not entry:
                choice[said] = Raw(b"{}")
                return False
            if "role" not in entry:  # vLLM 0.32 writes it after `content` in every later delta
                entry = {"content": entry.pop("content", _NULL), "reasoning": _NULL, **entry}
            elif thought is not None:
                entry["reasoning"] = _NULL
        choice[said] = Raw(_ENCODER.encode(entry))
        return True
