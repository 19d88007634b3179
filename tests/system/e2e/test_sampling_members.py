"""Each sampling parameter and request member of the installed vLLM is decided in `tokencache.dialects.chat.sampling`."""

import json
import subprocess

from rig.server import default_venv

from tokencache.dialects.chat.sampling import OTHERS, RECORDED

LISTS = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

print(json.dumps([*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *SamplingParams.__struct_fields__]))
"""


def test_no_member_of_vllm_is_undecided():
    made = subprocess.run([default_venv() / "bin/python", "-c", LISTS], capture_output=True, check=True, text=True)
    names = {name for name in json.loads(made.stdout.splitlines()[-1]) if not name.startswith("_")}
    decided = {*RECORDED, *(name for group in OTHERS.values() for name in group)}
    assert not sorted(names - decided)
    assert len(names) > 80
