"""Reads each format back as its trainer does: every row as ids, mask and log probabilities over all of its tokens.

A reader knows the layout of its trainer and nothing about the writer. `faults` compares the rows with what was sampled: it names each token
that is trained twice, in the wrong place or never, and each that is trained although it was not sampled. A new format adds its reader to
`READERS`.
"""

import struct
from collections import Counter
from typing import NamedTuple


class Trained(NamedTuple):
    """A row as its trainer uses it: three lists over the same tokens, prompt and response."""

    token_ids: list
    mask: list
    logprobs: list


def split_row(prompt, response, mask, logprobs):
    """Join a prompt, which is never trained, and a response."""
    return Trained([*prompt, *response], [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)


def read_native(written):
    return [Trained(s["token_ids"], s["loss_mask"], s["logprobs"]) for s in written["sequences"]]


def read_verl(written):
    return [split_row(o["prompt_ids"], o["response_ids"], o["response_mask"], o["response_logprobs"]) for o in written["outputs"]]


def read_slime(written):
    rows = []
    for sample in written["samples"]:
        at = len(sample["tokens"]) - sample["response_length"]
        rows.append(split_row(sample["tokens"][:at], sample["tokens"][at:], sample["loss_mask"], sample["rollout_log_probs"]))
    return rows


def read_skyrl(written):
    batch = written["generator_output"]
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return [split_row(*row) for row in zip(*(batch[name] for name in names), strict=True)]


def read_trl(written):
    return [split_row(r["prompt_ids"], r["completion_ids"], r["env_mask"], r["logprobs"]) for r in written["rows"]]


def read_tinker(written):
    """Position `i` of the input predicts target `i`. Together they are the sequence, whose first token is never a target."""
    rows = []
    for datum in written["data"]:
        tensors = {name: tensor["data"] for name, tensor in datum["loss_fn_inputs"].items()}
        inputs, targets = [], tensors["target_tokens"]
        for chunk in datum["model_input"]["chunks"]:  # the tokens of an image are only among the targets
            inputs += chunk["tokens"] if "tokens" in chunk else targets[len(inputs) - 1 :][: chunk["expected_tokens"]]
        assert inputs[1:] == targets[:-1]
        assert len(inputs) == len(targets)
        assert all(type(one) is float for one in tensors["mask"])
        first = inputs[:1]  # of a sequence of one token not even that: it predicts nothing
        rows.append(split_row(first, targets, [int(one) for one in tensors["mask"]], tensors["logprobs"]))
    return rows


def follow(calls):
    """Join calls, each given as (whole prompt, completion, log probabilities), to one row. New tokens of a prompt have mask 0.

    As NeMo RL reads the items of a response (`nemo_rl/environments/nemo_gym.py` at 00420a1,
    `_postprocess_nemo_gym_to_nemo_rl_result`): it asserts that each prompt begins with all that it has seen, and refuses a
    response without a generation.
    """
    seen, mask, logprobs = [], [], []
    for prompt, completion, values in calls:
        assert seen == prompt[: len(seen)], "Non-contiguous messages found!"
        added = prompt[len(seen) :]
        seen += added + completion
        mask += [0] * len(added) + [int(bool(values))] * len(completion)
        logprobs += [0.0] * len(added) + (values or [0.0] * len(completion))
    assert seen, "a result with no generation data"
    return Trained(seen, mask, logprobs)


def token_fields(entry):
    return entry["prompt_token_ids"], entry["generation_token_ids"], entry["generation_log_probs"]


def read_nemo_gym(written):
    return [
        follow(token_fields(item) for item in row["response"]["output"] if item.get("generation_token_ids")) for row in written["responses"]
    ]


def read_verifiers(trace, *, shared_once=False):
    """Return a row for each leaf of the graph (`Trace.branches`) except those in which nothing was sampled, as prime-rl does.

    Older versions of its `trace_to_samples` (`src/prime_rl/orchestrator/trajectories.py`, at 004274e) train a node in
    every branch that holds it, newer ones only in the first (`shared_once`).
    """
    nodes, rows, trained = trace["nodes"], [], set()
    parents = {node["parent"] for node in nodes}
    for leaf in (at for at in range(len(nodes)) if at not in parents):
        path, at = [], leaf
        while at is not None:
            path.insert(0, at)
            at = nodes[at]["parent"]
        ids, mask, logprobs = [], [], []
        for at in path:
            values = iter(nodes[at].get("logprobs", ()))
            own = [int(one) for one in nodes[at].get("mask", ())]
            ids += nodes[at].get("token_ids", ())
            logprobs += [next(values) if one else 0.0 for one in own]
            assert next(values, None) is None
            mask += [0] * len(own) if shared_once and at in trained else own
        trained.update(path)
        if any(mask):
            rows.append(Trained(ids, mask, logprobs))
    return rows


def read_atif(written):
    rows = []
    for trajectory in written["trajectories"]:
        own = [step["metrics"] for step in trajectory["steps"] if "metrics" in step and not step.get("is_copied_context")]
        rows.append(follow((one["prompt_token_ids"], one["completion_token_ids"], one.get("logprobs", [])) for one in own))
    return rows


READERS = {
    "native": read_native,
    "verl": read_verl,
    "slime": read_slime,
    "miles": read_slime,
    "skyrl": read_skyrl,
    "trl": read_trl,
    "tinker": read_tinker,
    "nemo-gym": read_nemo_gym,
    "verifiers": read_verifiers,
    "prime-rl": read_verifiers,
    "atif": read_atif,
}
"""By the name of the format."""


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0] == value


def faults_of(name, written, ground_truth):
    """The faults of a format. In `atif` a step is trained as a whole or not at all, so one with forced ids is not."""
    found = faults(READERS[name](written), ground_truth)
    partly = any(None in logprobs for _, _, logprobs in ground_truth)
    return [fault for fault in found if not (name == "atif" and partly and "never trained" in fault)]


def faults(rows, ground_truth):
    """Return what is wrong with rows, given what was sampled: (prompt, completion, log probabilities) of each turn.

    A token is identified by all tokens before it. A token without a known log probability (`None`) is not trained.
    """
    sampled = Counter(
        (tuple(prompt + completion[:i]), completion[i], logprobs[i])
        for prompt, completion, logprobs in ground_truth
        for i in range(len(completion))
        if len(logprobs) == len(completion) and logprobs[i] is not None
    )
    trained = Counter()
    found = []
    for n, (ids, mask, logprobs) in enumerate(rows):
        if not len(ids) == len(mask) == len(logprobs):
            found.append(f"row {n}: {len(ids)} ids, {len(mask)} mask entries, {len(logprobs)} log probabilities")
            continue
        if not all(type(one) is int for one in ids + mask) or not all(type(one) is float and single(one) for one in logprobs):
            found.append(f"row {n}: ids and mask must be ints, log probabilities floats that float32 holds")
        if set(mask) - {0, 1}:
            found.append(f"row {n}: mask entries other than 0 and 1")
        found += [f"row {n}: token {i} has mask 0 and a log probability" for i in range(len(ids)) if not mask[i] and logprobs[i]]
        trained.update((tuple(ids[:i]), ids[i], logprobs[i]) for i in range(len(ids)) if mask[i])
    found += [f"sampled {n} times, never trained so: {key[1:]} behind {len(key[0])} tokens" for key, n in (sampled - trained).items()]
    found += [f"trained {n} times too often: {key[1:]} behind {len(key[0])} tokens" for key, n in (trained - sampled).items()]
    return found
