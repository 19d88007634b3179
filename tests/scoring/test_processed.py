"""Values after temperature and top-p are recognised; values of other weights are not taken for them."""

import math
import random

import pytest

from tokencache.scoring.processed import Processing, explains, not_neutral, processing_of

TOKENS, TOP = 60, 20


def model(rng, vocabulary, spread):
    """Sorted log probabilities of a place."""
    logits = [rng.gauss(0, spread) for _ in range(vocabulary)]
    total = math.log(math.fsum(map(math.exp, logits)))
    return sorted((logit - total for logit in logits), reverse=True)


def sampled(rng, logprobs, processing):
    """A token of a place, and its value after processing: as vLLM does it, temperature, then min-p, top-k and top-p."""
    weights = [math.exp(value / processing.temperature) for value in logprobs]
    kept = [w for w in weights if w >= processing.min_p * weights[0]][: processing.top_k or None]
    total, so_far, count = math.fsum(kept), 0.0, 0
    while count < len(kept) and so_far < processing.top_p * total:
        so_far += kept[count]
        count += 1
    token = rng.choices(range(count), kept[:count])[0]
    return token, logprobs[token] / processing.temperature - math.log(math.fsum(kept[:count]))


@pytest.mark.parametrize("spread", [1.2, 2.5])
@pytest.mark.parametrize(
    "processing",
    [
        Processing(temperature=0.7),
        Processing(temperature=0.7, top_p=0.9),
        Processing(temperature=1.5),
        Processing(top_p=0.8),
        Processing(temperature=0.6, top_p=0.95, top_k=20),
        Processing(temperature=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_processed_values_are_explained_and_other_differences_are_not(processing, spread):
    rng = random.Random(3)
    recorded, own, other, top = [], [], [], []
    for _ in range(TOKENS):
        place = model(rng, 2000, spread)
        token, value = sampled(rng, place, processing)
        recorded.append(value)
        own.append(place[token])
        other.append(place[token] + rng.gauss(0, 0.3))
        top.append(place[:TOP])
    assert explains(recorded, own, top, processing)
    assert not explains(other, own, top, processing), "other weights"
    assert not explains([2 * b - a for a, b in zip(recorded, own, strict=True)], own, top, processing), "the opposite sign"
    assert not explains(recorded, own, top, Processing())
    assert not explains(recorded[:3], own[:3], top[:3], processing), "too few tokens"


NEUTRAL = {"temperature": 1, "top_p": 1.0, "top_k": -1}


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (NEUTRAL, ""),
        (NEUTRAL | {"max_tokens": 100, "stop": ["a"], "seed": 3, "tool_choice": "auto"}, ""),
        ({}, "temperature is not recorded"),
        ({"temperature": 1, "top_p": 1}, "top_k is not recorded"),
        (NEUTRAL | {"temperature": 0.7}, "temperature is 0.7"),
        (NEUTRAL | {"top_p": 0.9}, "top_p is 0.9"),
        (NEUTRAL | {"logit_bias": {"5": 1}}, "logit_bias is {'5': 1}"),
        (NEUTRAL | {"tool_choice": "required"}, "tool_choice is required"),
        (NEUTRAL | {"strict_tools": ["bash"]}, "strict_tools is ['bash']"),
        (NEUTRAL | {"strict_tools": ["bash"], "tool_choice": "none"}, ""),
    ],
)
def test_what_changes_the_distribution(sampling, words):
    assert not_neutral(sampling) == words


def test_greedy_sampling_divides_by_nothing():
    assert processing_of({"temperature": 0, "top_k": -1}) == Processing()
    assert processing_of({"temperature": 0.5, "top_p": None, "min_p": 0.1}) == Processing(temperature=0.5, min_p=0.1)
