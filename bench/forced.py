"""A vLLM logits processor that forces the model to emit the ids in the request; it runs inside vLLM's engine process.

A request with `vllm_xargs: {"say": [ids]}` samples these ids, whether tokenizing their text again reproduces them or not (drift), and stops
after the last one. vLLM 0.32 has two interfaces, one for each of its model runners: V1 runs on CPU, V2 by default on GPUs.
"""

from typing import Any

# not installed here: only vLLM's Python imports this
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor


class Forced(LogitsProcessor, V2LogitsProcessor):
    """`state` is the device for V1, and what the processors know of the requests for V2."""

    def __init__(self, vllm_config: Any, state: Any, is_pin_memory: bool = False) -> None:
        del is_pin_memory
        self.stop = vllm_config.model_config.hf_config.eos_token_id
        self.batch: dict[int, tuple[list[int], list[int]]] = {}  # V1: index in the batch -> ids to emit, ids emitted so far
        self.state = state
        self.slots: dict[int, tuple[list[int], int]] = {}  # V2: slot of a request -> ids to emit and the stop id, length of the prompt

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

    def add_request(self, slot: int, params: Any) -> bool:
        """V2: a request enters; its slot is its own until it ends."""
        self.slots.pop(slot, None)
        wanted = (params.extra_args or {}).get("say")
        if wanted:
            self.slots[slot] = [*map(int, wanted), self.stop], int(self.state.prompt_len.np[slot])
        return bool(wanted)

    def apply(self, logits: Any, context: Any = None) -> Any:
        if context is not None:
            return self._apply_v2(logits, context)
        for index, (wanted, emitted) in self.batch.items():
            token = wanted[len(emitted)] if len(emitted) < len(wanted) else self.stop
            kept = logits[index, token].item()
            logits[index].fill_(float("-inf"))
            logits[index, token] = kept
        return logits

    def _apply_v2(self, logits: Any, context: Any) -> Any:
        """V2: the tokens so far are known only on the device, so the position there determines the next one."""
        for row, slot in enumerate(context.idx_mapping_np.tolist()):
            if slot not in self.slots:
                continue
            wanted, prompt = self.slots[slot]
            at = (context.pos[row : row + 1] + 1 - prompt).clamp(0, len(wanted) - 1).long()
            token = context.pos.new_tensor(wanted).index_select(0, at).long()
            kept = logits[row].gather(0, token)
            logits[row].fill_(float("-inf"))
            logits[row].scatter_(0, token, kept)
        return logits
