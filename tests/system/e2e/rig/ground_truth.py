"""The ground-truth log: every request's prompt ids and sampled ids, written to a file by the engine itself.

It is a logits processor that changes no logits and runs inside vLLM's engine process, so it sees the requests of every route. Of vLLM's
dialects only chat completions and completions return ids to a client; with this log the ids of a call over `/v1/messages` or
`/v1/responses` are known as well, with or without a proxy in between.

`$GROUND_TRUTH` names the file. A request that leaves the batch gives a line `{"request": n, "prompt": [...], "sampled": [...]}`; `n` counts
requests in the order in which the engine first scheduled them. When a batch is full, vLLM also preempts unfinished requests, so of several
lines with one `n` the last one counts. `read_ground_truth` does that.
"""

import json
import os
from pathlib import Path

try:
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality
except ImportError:  # the tests, which read the log, run without vLLM
    LogitsProcessor = object


class GroundTruthWriter(LogitsProcessor):
    """Keeps the ids of every request in the batch, and writes them when it leaves."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.file = Path(os.environ["GROUND_TRUTH"]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for as long as the engine lives
        self.batch = {}  # index in the batch -> (number, prompt ids, list to which vLLM adds the sampled ids)
        self.numbers = {}  # id of that list -> (number, the list itself, so that its id is not reused)
        self.count = 0

    def is_argmax_invariant(self):
        return True

    def apply(self, logits):
        return logits

    def number(self, sampled):
        if id(sampled) not in self.numbers:
            self.count += 1
            self.numbers[id(sampled)] = (self.count, sampled)
        return self.numbers[id(sampled)][0]

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.leave(index)
        for index, _, prompt, sampled in batch_update.added:
            self.leave(index)
            self.batch[index] = (self.number(sampled), list(prompt or ()), sampled)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.batch.pop(source, None), self.batch.pop(target, None)
            if moved is not None:
                self.batch[target] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self.batch[source] = replaced
            else:  # a request that ended and whose slot another one is moved to is not among the removed ones
                self.write(replaced)

    def leave(self, index):
        self.write(self.batch.pop(index, None))

    def write(self, left):
        if left is not None:
            number, prompt, sampled = left
            self.file.write(json.dumps({"request": number, "prompt": prompt, "sampled": list(sampled)}) + "\n")


def read_ground_truth(path):
    """Every request as `(prompt ids, sampled ids)`, in the order in which the engine scheduled them."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    last = {line["request"]: (line["prompt"], line["sampled"]) for line in lines}
    return [last[number] for number in sorted(last)]
