"""Which recorded parameters of a request change the distribution that the policy's tokens are sampled from.

An engine's *raw* log probabilities are those of the model's own distribution. They are the policy's only if no parameter changed it.
"""

from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1, None),
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (0, None),
    "tool_choice": ("none", "auto", None),
    "response_format": (None, {"type": "text"}),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), (None,)),
}
"""The values with which a parameter changes nothing (vLLM 0.32, `SamplingParams`). Without it the engine's own default counts."""


def bending(sampling: Mapping[str, Any]) -> str:
    """Return the first recorded parameter that changes the distribution, with its value; `""` if none does."""
    return next((f"{name} is {value}" for name, value in sampling.items() if name in NEUTRAL and value not in NEUTRAL[name]), "")
