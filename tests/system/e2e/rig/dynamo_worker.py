"""A worker of NVIDIA's Dynamo. usage: dynamo_worker.py scripted|vllm MODEL_DIR NAMESPACE

`scripted`  no model: it says the turns of `$EPISODES`, each time in another tokenization (`script`), with a log probability for each id.
            The file `$PACE` has the seconds between two chunks, `$MOST` how many ids a chunk has at most. `$HEARD` gets a line for
            each request: its prompt's ids, and those that were sampled before it was cancelled.
`vllm`      the engine of a real vLLM on CPU (`vllm.AsyncLLM`), with processed log probabilities

Dynamo's frontend renders, parses tool calls (hermes) and reasoning (qwen3), and sends ids.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from script import Drifter, scripted_text
from tokenizers import Tokenizer

MODEL = "tiny"
CONTEXT, BLOCK, BLOCKS = 32768, 16, 100000
REPLY = 4096


class Worker(LLMEngine):
    """What both kinds have in common."""

    def __init__(self, model):
        self.model = model

    @classmethod
    async def from_args(cls, argv=None):
        del argv
        _, _, model, namespace = sys.argv
        return cls(model), WorkerConfig(
            namespace=namespace,
            model_name=model,
            served_model_name=MODEL,
            discovery_backend="file",
            request_plane="tcp",
            event_plane="zmq",
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
        )

    async def start(self, worker_id):
        del worker_id
        self.prepare()
        return EngineConfig(self.model, MODEL, llm=LlmRegistration(CONTEXT, BLOCK, BLOCKS, 64, CONTEXT))

    async def cleanup(self):
        pass


class Scripted(Worker):
    """Says scripted turns."""

    def prepare(self):
        self.tokenizer = Tokenizer.from_file(f"{self.model}/tokenizer.json")
        self.drifter, self.stop = Drifter(self.tokenizer), self.tokenizer.token_to_id("<|im_end|>")
        self.episodes = json.loads(Path(os.environ["EPISODES"]).read_text(encoding="utf-8"))
        self.running = {}

    def planned(self, prompt):
        """The ids of the reply to a prompt."""
        text = scripted_text(self.episodes, self.tokenizer.decode(prompt, skip_special_tokens=False))
        return [*self.drifter.encode(text or "There is no script.", random.Random()), self.stop]

    @staticmethod
    def logprobs(token, allowed):
        """The log probability of an id, and the likeliest ids: under a mask it is certain."""
        if not allowed:
            return {"log_probs": [-0.001 * (1 + token % 1000)]}
        masked = {"rank": 2, "token_id": token + 1, "token": "?", "logprob": -9999.0}
        return {"log_probs": [0.0], "top_logprobs": [[{"rank": 1, "token_id": token, "token": "?", "logprob": 0.0}, masked]]}

    async def generate(self, request, context):
        prompt = list(request["token_ids"])
        limit = (request.get("stop_conditions") or {}).get("max_tokens") or REPLY
        allowed = ((request.get("extra_args") or {}).get("sampling_options") or {}).get("allowed_token_ids")
        planned = [token for token in allowed for _ in range(limit)] if allowed else self.planned(prompt)
        sampled = []
        self.running[context.id()] = {"prompt": prompt, "sampled": sampled, "request": {**request, "token_ids": None}}
        try:
            while len(sampled) < len(planned[:limit]):
                seconds, most = pace()
                await asyncio.sleep(seconds)
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                chunk = until_stop(planned[len(sampled) : limit][: random.randint(1, most)], self.stop)
                sampled += chunk
                ended = (
                    {"finish_reason": "stop"} if chunk[-1] == self.stop else {"finish_reason": "length"} if len(sampled) == limit else {}
                )
                values = [self.logprobs(token, allowed) for token in chunk]
                yield {"token_ids": chunk, "index": 0, **{name: [value[name][0] for value in values] for name in values[0]}, **ended}
                if chunk[-1] == self.stop:
                    return
        finally:
            self.note(context)

    async def abort(self, context):
        """Dynamo may drop the generator of a request that is cancelled; then its `finally` runs at some garbage collection."""
        self.note(context)

    def note(self, context):
        """Write what was heard of a request, once."""
        if (heard := self.running.pop(context.id(), None)) is not None:
            with Path(os.environ["HEARD"]).open("a", encoding="ascii") as file:
                file.write(json.dumps(heard) + "\n")


def until_stop(ids, stop):
    """The ids up to a stop id."""
    return ids[: ids.index(stop) + 1] if stop in ids else ids


def pace():
    """Seconds between two chunks, and the most ids of one, at present."""
    seconds, most = (Path(os.environ[name]).read_text(encoding="ascii") for name in ("PACE", "MOST"))
    return float(seconds), int(most)


class RealVllm(Worker):
    """Samples with vLLM's engine and the scripted model of `scripted_model`."""

    def prepare(self):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self.model,
                dtype="float32",
                enforce_eager=True,
                max_model_len=CONTEXT,
                max_num_seqs=16,
                logprobs_mode="processed_logprobs",
                logits_processors=["scripted_model:ScriptedModel"],
            )
        )

    async def generate(self, request, context):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        prompt, stops, options = list(request["token_ids"]), request["stop_conditions"], request["sampling_options"]
        extra = (request.get("extra_args") or {}).get("sampling_options") or {}
        params = SamplingParams(
            **{name: options[name] for name in ("temperature", "top_p", "top_k", "seed") if options.get(name) is not None},
            max_tokens=min(stops.get("max_tokens") or REPLY, CONTEXT - len(prompt)),
            ignore_eos=bool(stops.get("ignore_eos")),
            stop_token_ids=stops.get("stop_token_ids"),
            allowed_token_ids=extra.get("allowed_token_ids"),
            logprobs=int((request.get("output_options") or {}).get("logprobs") or 0),
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        async for output in self.engine.generate(TokensPrompt(prompt_token_ids=prompt), params, context.id()):
            if context.is_stopped():
                await self.engine.abort(context.id())
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            (part,) = output.outputs
            ended = {"finish_reason": part.finish_reason} if part.finish_reason else {}
            yield {"token_ids": list(part.token_ids), "index": 0, **likeliest(part), **ended}


def likeliest(part):
    """The log probabilities of a part of vLLM's output, as Dynamo has them."""
    if not part.logprobs:
        return {}
    own = [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
    tops = [
        [{"rank": one.rank, "token_id": token, "token": f"{token}", "logprob": max(one.logprob, -9999.0)} for token, one in found.items()]
        for found in part.logprobs
    ]
    return {"log_probs": own, "top_logprobs": tops}


KINDS = {"scripted": Scripted, "vllm": RealVllm}

if __name__ == "__main__":
    run(KINDS[sys.argv[1]])
