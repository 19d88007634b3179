"""What the simulated engine knows to be true: one entry for each generation, written by the engine itself.

A test that compares a proxy's records with what the proxy was told proves little. The books are kept on the other side
of the wire: the ids that went into the model and those that came out, with their log probabilities, whatever of them
was asked for, sent or lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BookEntry:
    """One generation: one choice of one chat completion."""

    request_id: str
    """The completion's `id`, the same for all choices of a request."""
    index: int
    """Position among the request's choices."""
    session: str | None
    """Header `X-Session-ID`, or the body's `session_id`."""
    model: str
    stream: bool
    ids_supplied: bool
    """Whether the prompt came as ids (`kv_transfer_params.prompt_token_ids`) and was used as such."""
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    """Every id generated, the end-of-turn id and ids of a stop string included; grows while the generation runs."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms, float32 values, one per completion id."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls` or `abort`; None while the generation runs."""
    stop_reason: int | str | None = None
    """The stop id or stop string of the request that ended it, if one did."""
    aborted: bool = False
    """The client went away, or a fault cut the connection, before the last id was written."""
