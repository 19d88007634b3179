"""Turns trajectories into training batches, with plain functions.

All functions compute from `Trajectory` values alone: none opens a socket or calls an engine. Only `load_experts`,
`load_media` and `load_images` read files.

`selection`   chooses the rows to train on, and reports every row that it drops
`advantages`  compares the rewards of the sessions of a group
`forest`      joins rows to a prefix forest: a shared prefix occurs once, and each sampled token has one owner
`forest_check` checks a prefix forest against its rows
`files`       reads files beside trajectories, from a directory or an object store
`experts`     loads the routed experts of a row as a numpy array (needs numpy)
`media`       loads the images of a row (as images of Pillow, if that is installed), and processes them for a model
`tensors`     pads or packs rows, or a forest, to numpy arrays or torch tensors (needs numpy)

    selection = select(trajectories, no_side_calls, at_least(16))
    advantages = row_advantages(selection.kept, group_advantages(trajectories))
    batch = pad(selection.kept, advantages)
"""

from tokencache.batching.advantages import group_advantages, leave_one_out, mean_std, row_advantages
from tokencache.batching.experts import load_experts
from tokencache.batching.media import image_inputs, load_images, load_media
from tokencache.batching.selection import (
    DroppedRow,
    Rule,
    Selection,
    TrainingRow,
    at_least,
    complete_only,
    main_line,
    max_lag,
    no_discarded_retries,
    no_placeholders,
    no_side_calls,
    policy_logprobs,
    rewarded,
    select,
    valid_only,
)

__all__ = [
    "DroppedRow",
    "Rule",
    "Selection",
    "TrainingRow",
    "at_least",
    "complete_only",
    "group_advantages",
    "image_inputs",
    "leave_one_out",
    "load_experts",
    "load_images",
    "load_media",
    "main_line",
    "max_lag",
    "mean_std",
    "no_discarded_retries",
    "no_placeholders",
    "no_side_calls",
    "policy_logprobs",
    "rewarded",
    "row_advantages",
    "select",
    "valid_only",
]
