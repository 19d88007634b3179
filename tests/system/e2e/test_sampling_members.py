"""Each sampling parameter and request member of the installed vLLM has a row in `tokencache.dialects.members`."""

import json
import subprocess

from rig.server import default_venv

from tokencache.dialects.members import ROWS

LISTS = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

print(json.dumps([*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *SamplingParams.__struct_fields__]))
"""


def test_each_member_of_vllm_has_a_row():
    made = subprocess.run([default_venv() / "bin/python", "-c", LISTS], capture_output=True, check=True, text=True)
    names = {name for name in json.loads(made.stdout.splitlines()[-1]) if not name.startswith("_")}
    assert not sorted(names - {row.name for row in ROWS})
    assert len(names) > 80
