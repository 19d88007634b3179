"""The documented edge cases of NeMo RL's splice, as vectors for the test server that replaces its worker."""

import json
import os
from pathlib import Path

import pytest

from tests.support.material import needs
from tests.system.nemo.worker import splice

EOS = 2
QWEN3_EOS = 151645


@pytest.mark.parametrize(
    ("prefix", "template_prefix", "template", "spliced"),
    [
        # an empty prefix changes nothing
        ([], [1, EOS], [1, EOS, 3], [1, EOS, 3]),
        # the model's own tokens up to the end of its turn, then the template's
        ([11, 40, 220, 17, EOS], [11, 40, 1001, EOS], [11, 40, 1001, EOS, 21, 22, 40], [11, 40, 220, 17, EOS, 21, 22, 40]),
        # a truncated turn: the template's end of turn closes it
        ([11, 40, 220], [11, 40, 220, EOS], [11, 40, 220, EOS, 21], [11, 40, 220, EOS, 21]),
        # several ends of turn: the one after the last assistant message counts
        ([5, EOS, 6, EOS, 7, EOS], [5, EOS, 6, EOS, 9, EOS], [5, EOS, 6, EOS, 9, EOS, 8, EOS], [5, EOS, 6, EOS, 7, EOS, 8, EOS]),
        # reasoning that the template strips once a user message follows shifts positions, not counts
        ([5, EOS, 90, 91, 7, EOS], [5, EOS, 90, 91, 7, EOS], [5, EOS, 7, EOS, 8, EOS, 4], [5, EOS, 90, 91, 7, EOS, 8, EOS, 4]),
    ],
)
def test_vectors(prefix, template_prefix, template, spliced):
    assert splice(prefix, template_prefix, template, EOS) == spliced


@needs("test data of NeMo RL", "TOKENCACHE_NEMO_RL_VECTORS" in os.environ)
def test_nemo_rl_s_own_vector():
    """`tests/unit/models/generation/maybe_correct_merged_tokens_test_data.json` of NVIDIA-NeMo/RL (at 7ea279a), a turn of Qwen3's."""
    vector = json.loads(Path(os.environ["TOKENCACHE_NEMO_RL_VECTORS"]).read_text())
    seen, rendered = vector["seen_token_ids"], vector["output_prompt_token_ids"]
    assert rendered[: len(seen)] != seen
    assert splice(seen, seen, rendered, QWEN3_EOS) == vector["expected_output"]
    assert vector["expected_output"][: len(seen)] == seen


@pytest.mark.parametrize(("template_prefix", "template"), [([1, 3], [1, 3, 4]), ([1, EOS, EOS], [1, EOS, 4])])
def test_without_its_end_of_turn_the_position_is_not_found(template_prefix, template):
    with pytest.raises(AssertionError, match="EOS token"):
        splice([9], template_prefix, template, EOS)
