"""A vLLM logits processor that forces the model to emit the ids in the request; it runs inside vLLM's engine process.

The bench decides what each reply is, down to the ids: `vllm_xargs: {"say": [ids]}`. So the same text can be sampled in the tokenizer's own
ids, or in ids that tokenizing the text again does not reproduce (drift). After the last id the model stops. A request without `say` is
not changed.
"""

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality  # not installed here: only vLLM's Python imports this


class Forced(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        del device, is_pin_memory
        self.stop = vllm_config.model_config.hf_config.eos_token_id
        self.batch: dict[int, tuple[list[int], list[int]]] = {}  # index in the batch -> ids to emit, ids emitted so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.batch.pop(index, None)
        for index, params, _, emitted in batch_update.added:
            self.batch.pop(index, None)
            wanted = (params.extra_args or {}).get("say")
            if wanted:
                self.batch[index] = ([int(token) for token in wanted], emitted)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.batch.pop(source, None), self.batch.pop(target, None)
            if moved is not None:
                self.batch[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.batch[source] = replaced

    def apply(self, logits: Any) -> Any:
        for index, (wanted, emitted) in self.batch.items():
            token = wanted[len(emitted)] if len(emitted) < len(wanted) else self.stop
            kept = logits[index, token].item()
            logits[index].fill_(float("-inf"))
            logits[index, token] = kept
        return logits
