"""A vLLM logits processor that forces scripted turns; it runs inside vLLM's engine process.

A prompt that contains `EPISODE:name` gets the turns of that episode, one for each assistant turn that the prompt opens. The text is
scripted, the tokens are not: each turn is sampled in a random tokenization that the tokenizer would not choose, another one for each
request. So tokenizing the text again gives other ids: drift, in every turn.

A prompt without a marker is not changed: the model samples from its random weights. If a request's sampler excludes the next scripted
token (a grammar, `allowed_token_ids`), the script ends there and free sampling follows.

Episodes are read once from the file that `$EPISODES` names. It maps a name to a list of turns, or to
`{"turns": [...], "side": "...", "asked": {words: turn}}`; `side` is the reply to a prompt that offers no tools (harnesses request titles
that way), a turn of `asked` the reply to one with these words after the last answer (such as the request for a summary).
A prompt that ends with the beginning of a turn gets the rest of it, wherever it was cut: that is how a reply is continued.
After its last turn an episode repeats that turn. `{{seen:PATTERN}}` in a turn is replaced by what the pattern's group last matched in
the prompt, such as an id that a tool returned in this run. A turn with the character U+241F is tokenized piece by piece between these
marks, and a piece that is one token stays one: `␟ Skin␟ny␟` is never the token of ` Skinny`.

The file that `$PACE` names holds the minimum time of each step in seconds; a test may write it anew. A model this small samples
thousands of tokens before a busy machine schedules the API server, so tests that act in the middle of a reply need it.
"""

import json
import logging
import os
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from script import CUT, Drifter, scripted_text
from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

REMEMBERED = 4096

logger = logging.getLogger(__name__)


@dataclass
class Line:
    """The script of one request: its ids, and the list to which vLLM adds the sampled ids."""

    planned: list
    sampled: list
    free: bool = False


class ScriptedModel(LogitsProcessor):
    """Forces the scripted token of each request that has a script."""

    def __init__(self, vllm_config, device, is_pin_memory):
        model = vllm_config.model_config
        self.tokenizer = Tokenizer.from_file(str(Path(model.tokenizer) / "tokenizer.json"))
        self.drifter = Drifter(self.tokenizer)
        self.stop_id = model.hf_config.eos_token_id
        self.opener = self.tokenizer.token_to_id("<|im_start|>")
        self.episodes = json.loads(Path(os.environ["EPISODES"]).read_text(encoding="utf-8"))
        self.batch = {}  # index in the batch -> Line
        self.lines = OrderedDict()  # id of the request's list of sampled ids -> Line, for requests that leave the batch and return
        self.planned = 0
        self.pace = Path(os.environ["PACE"])

    def is_argmax_invariant(self):
        return False

    def read(self, prompt_ids):
        return self.tokenizer.decode(list(prompt_ids), skip_special_tokens=False)

    def line(self, params, prompt_ids, sampled):
        """Plans a request once: vLLM may preempt it unfinished and resume it."""
        known = self.lines.get(id(sampled))
        if known is not None and known.sampled is sampled:
            return known
        text = (
            None if prompt_ids is None else scripted_text(self.episodes, self.tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        )
        if text is None:
            return None
        self.planned += 1
        rng = random.Random(f"{self.planned if params.seed is None else params.seed}:{text}")
        begun = self.begun(prompt_ids)
        rest = text.replace(CUT, "").encode().removeprefix(begun) if begun else b""
        continues = begun and text.replace(CUT, "").encode().startswith(begun)
        ids = self.drifter.encode_rest(rest, rng) if continues else self.drifter.encode(text, rng)
        line = Line([*ids, self.stop_id], sampled)
        self.lines[id(sampled)] = line
        while len(self.lines) > REMEMBERED:
            self.lines.popitem(last=False)
        return line

    def begun(self, prompt_ids):
        """The bytes of the turn that the end of a prompt has begun."""
        ids = list(prompt_ids)
        opened = max((at for at, token_id in enumerate(ids) if token_id == self.opener), default=len(ids))
        return self.drifter.bytes_of(ids[opened + 1 :]).removeprefix(b"assistant\n")

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.batch.pop(index, None)
        for index, params, prompt_ids, sampled in batch_update.added:
            self.batch.pop(index, None)
            line = self.line(params, prompt_ids, sampled)
            if line is not None:
                self.batch[index] = line
        for source, target, direction in batch_update.moved:
            moved, replaced = self.batch.pop(source, None), self.batch.pop(target, None)
            if moved is not None:
                self.batch[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.batch[source] = replaced

    def apply(self, logits):
        time.sleep(float(self.pace.read_text(encoding="ascii")))
        for index, line in self.batch.items():
            if line.free:
                continue
            position = len(line.sampled)
            token_id = line.planned[position] if position < len(line.planned) else self.stop_id
            kept = logits[index, token_id].item()
            if kept == float("-inf"):
                logger.warning("token %d of a script is excluded (%r): sampling freely", position, self.tokenizer.id_to_token(token_id))
                line.free = True
                continue
            logits[index].fill_(float("-inf"))
            logits[index, token_id] = kept
        return logits
