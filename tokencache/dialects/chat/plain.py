"""Plain chunks: nearly all of a stream says a piece of text and nothing else, and need not be read to be passed on.

    data: {"id":…,"object":"chat.completion.chunk","created":…,"model":…,"choices":[{"index":0,"delta":{"content":" and"},
           "logprobs":{"content":[…]},"finish_reason":null,"token_ids":[323]}]}

Of such an event a harness that asked for neither sees the same bytes with `null` for its log probabilities and ids. One regular expression
finds it, member by member as vLLM (0.27 to 0.32) writes it, in a sixth of the time that a JSON reader and writer need; whatever is
written in any other way is no plain chunk, and is read. What was passed on so is read later, many at once (`engines.reply`).
"""

import re

_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_CHANCE = rb'\{"token":' + _TEXT + rb',"logprob":-?+[0-9.eE+-]++,"bytes":(?:\[[0-9,]*+\]|null),"top_logprobs":\[\]\}'
_ARGUMENTS = rb'\{"content":null,"tool_calls":\[\{"index":[0-9]++,"function":\{"arguments":' + _TEXT + rb"\}\}\]\}"
_PLAIN = re.compile(
    rb'(data: \{"id":' + _TEXT + rb',"object":"chat\.completion\.chunk","created":[0-9]++,"model":' + _TEXT + rb","
    rb'"choices":\[\{"index":[0-9]++,"delta":(?:\{"(?:content|reasoning)":' + _TEXT + rb"\}|" + _ARGUMENTS + rb'),"logprobs":)'
    rb'(?:null|\{"content":\[' + _CHANCE + rb"(?:," + _CHANCE + rb')*+\]\})(,"finish_reason":null,"token_ids":)\[[0-9,]*+\]\}\]\}\n\n',
    re.DOTALL,
)


def without_tokens(event: bytes) -> bytes | None:
    """A plain chunk's event without log probabilities and ids; `None` for every other event."""
    found = _PLAIN.fullmatch(event)
    return None if found is None else b"%snull%snull}]}\n\n" % found.groups()
