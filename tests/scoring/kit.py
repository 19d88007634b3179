"""Records rollouts at an engine without a proxy: text completions on exact ids, whose values become native rollouts.

What a proxy does about weights (salts, held calls) has no effect here, so a test can make every mistake that an audit must find.
"""

import itertools

from tokencache.trajectories.values import Figures, Sequence, Trajectory, TurnSpan

_NAMES = itertools.count()
_CREATED = itertools.count(1000)


class Recorder:
    """Calls an engine. `post(path, body)` returns the JSON of a reply."""

    def __init__(self, post, model="sim"):
        self.post, self.model = post, model

    async def rollout(self, *turns, session=None):
        """A rollout of one sequence. Each turn has new prompt ids and the members of its span; a function is awaited between turns."""
        token_ids, mask, logprobs, spans = [], [], [], []
        for turn in turns:
            if callable(turn):
                await turn()
                continue
            ids, members, sampling = turn
            start = len(token_ids)
            token_ids += ids
            model = members.get("model", self.model)
            body = {"model": model, "prompt": token_ids, "max_tokens": 60, "logprobs": 0, "return_token_ids": True, **sampling}
            (choice,) = (await self.post("/v1/completions", body))["choices"]
            sampled, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            mask += [0] * len(ids) + [1] * len(sampled)
            logprobs += [0.0] * len(ids) + values
            prompt = (start, len(token_ids))
            token_ids = token_ids + sampled
            members = {"logprob_kind": "raw", "logprobs_hash": "00", "model": model, **members}
            version = members.pop("version", "")
            if version:
                members["weight_versions"] = [{"version": version, "start": 0, "end": len(sampled)}]
            completion = (prompt[1], len(token_ids))
            sent = {name: value for name, value in sampling.items() if name not in {"cache_salt", "max_tokens", "ignore_eos"}}
            name, created = f"t{next(_NAMES)}", float(next(_CREATED))
            spans.append(TurnSpan(turn=name, prompt=prompt, completion=completion, sampling=sent, created=created, **members))
        sequence = Sequence(id="q1", token_ids=token_ids, loss_mask=mask, logprobs=logprobs, turns=spans, start="root", weight=1.0)
        figures = Figures(0, 0, 0, 0, 0, 0, {}, {}, {})
        return Trajectory(session=session or f"s{next(_NAMES)}", complete=True, sequences=[sequence], figures=figures)


def turn(ids, sampling=None, **members):
    """A turn for `Recorder.rollout`."""
    return list(ids), members, sampling or {}
