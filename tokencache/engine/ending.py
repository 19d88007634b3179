"""Decides how a reply ended: what its ids prove goes before what the engine says.

An engine may name another end than its ids show. vLLM (0.32, `chat_completion/serving.py`) writes `tool_calls` for every whole reply in
which its parser found a call, also if the limit of tokens cut the next call. A reply was certainly cut (`length`) if all of this holds:

1. it has as many ids as its limit: `max_tokens` of the request, or what the context of the model has room for
2. its last id is no stop id: of the request (`stop_token_ids`), of the model (the probe, and what was learned), or of the template
3. the engine names neither a stop id nor a stop string that ended it (`stop_reason`)
4. an id at which the model stops by itself is known: otherwise the last id may be one

Then each id is the engine's, and none of them ended the reply. In every other case the engine's word stays.
"""

from collections.abc import Mapping

import msgspec

from tokencache.dialects.json_io import value_of
from tokencache.dialects.members import LIMITS
from tokencache.engine.model import Model
from tokencache.engine.reply import Choice

_BROKEN_OFF = frozenset({"length", "abort", "error"})


def finish_reason(choice: Choice, fields: Mapping[str, msgspec.Raw], prompt_tokens: int, model: Model | None) -> str | None:
    """Return how a whole reply ended: `length` if its ids prove that it was cut, otherwise the engine's finish reason.

    Args:
        choice: the reply, with all its ids.
        fields: the members of the request, raw.
        prompt_tokens: the number of the prompt's tokens.
        model: the model; `None` if the engine could not be probed.
    """
    said = choice.finish_reason
    if said is None or said in _BROKEN_OFF or choice.stop_reason is not None or not choice.ids:
        return said
    if model is None or not model.stops_by_itself:
        return said
    last = choice.ids[-1]
    if last in model.stop_ids or last in model.capability.turn_ends or len(choice.ids) not in _limits(fields, prompt_tokens, model):
        return said
    own = value_of(fields["stop_token_ids"]) if "stop_token_ids" in fields else None
    return said if isinstance(own, list) and last in own else "length"


def _limits(fields: Mapping[str, msgspec.Raw], prompt_tokens: int, model: Model) -> set[int]:
    """Return the numbers of tokens at which an engine cuts the reply."""
    asked = [value for name in LIMITS if name in fields and isinstance(value := value_of(fields[name]), int)]
    room = model.capability.max_model_len
    return {*asked[:1], *([room - prompt_tokens] if room else ())}
