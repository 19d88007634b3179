"""On torch: the loss and all gradients of a prefix forest, of packed rows and of padded rows are those of single rows.

Needs torch, which `make install` does not install. `tests/system/e2e/test_tree_loss.py` runs this file where vLLM is installed.
"""

import pytest

from tests.batching.made import random_rows, row
from tests.support.material import require_package
from tokencache.batching.forest import build_forest
from tokencache.batching.tensors import as_torch, flatten, pack, pad, tree_mask

torch = require_package("torch")

TOLERANCE = 1e-5
VOCABULARY, POSITIONS, WIDTH, HEADS = 64, 256, 16, 2
SEEDS = range(8)


class TinyTransformer(torch.nn.Module):
    """Two layers of attention and an MLP, in float64. It sees positions and attention masks only as they are given."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(POSITIONS, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm": torch.nn.LayerNorm(WIDTH),
                    "qkv": torch.nn.Linear(WIDTH, 3 * WIDTH),
                    "out": torch.nn.Linear(WIDTH, WIDTH),
                    "mlp": torch.nn.Sequential(
                        torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
                    ),
                }
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, token_ids, position_ids, allowed):
        """Return the log probabilities of all next tokens. `allowed[q, k]` is whether token q attends to token k."""
        bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
        hidden = self.tokens(token_ids) + self.positions(position_ids)
        for layer in self.layers:
            parts = layer["qkv"](layer["norm"](hidden)).view(len(token_ids), 3, HEADS, -1)
            q, k, v = parts.permute(1, 2, 0, 3)
            weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias, dim=-1)
            hidden = hidden + layer["out"]((weights @ v).transpose(0, 1).reshape(len(token_ids), WIDTH))
            hidden = hidden + layer["mlp"](hidden)
        return torch.log_softmax(self.head(hidden), dim=-1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    return TinyTransformer()


def clipped_loss(log_probabilities, arrays, predicted_by, trained):
    """PPO's clipped loss, summed over trained tokens. `predicted_by` is the place whose logits predict each of them."""
    sampled = log_probabilities[predicted_by, arrays["token_ids"][trained]]
    ratio = torch.exp(sampled - arrays["logprobs"][trained].double())
    advantages = arrays["advantages"][trained].double()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def with_gradients(model, loss):
    """The value of a loss, and its gradients as one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    flat = [torch.zeros_like(p).ravel() if g is None else g.ravel() for p, g in zip(model.parameters(), gradients, strict=True)]
    return torch.cat([loss.detach().reshape(1), *flat])


def of_line(model, arrays, allowed, predicted_by):
    """The loss of arrays with one entry for each token."""
    trained = arrays["loss_mask"].nonzero().ravel()
    log_probabilities = model(arrays["token_ids"], arrays["position_ids"], allowed)
    return clipped_loss(log_probabilities, arrays, predicted_by[trained], trained)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def of_rows(model, rows, advantages):
    """The reference: each row on its own, written without the package's arrays."""
    loss = torch.zeros((), dtype=torch.float64)
    for one, advantage in zip(rows, advantages, strict=True):
        sequence = one.sequence
        if not any(sequence.loss_mask):
            continue
        arrays = {
            "token_ids": torch.tensor(sequence.token_ids),
            "position_ids": torch.arange(len(sequence.token_ids)),
            "loss_mask": torch.tensor(sequence.loss_mask),
            "logprobs": torch.tensor(sequence.logprobs),
            "advantages": torch.full((len(sequence.token_ids),), advantage),
        }
        loss = loss + of_line(model, arrays, causal(len(sequence.token_ids)), torch.arange(len(sequence.token_ids)) - 1)
    return with_gradients(model, loss)


def of_forest(model, rows, advantages, changes=None):
    flat = flatten(build_forest(rows), advantages)
    arrays = {**as_torch(flat), "allowed": torch.from_numpy(tree_mask(flat)), **(changes or {})}
    return with_gradients(model, of_line(model, arrays, arrays["allowed"], arrays["parents"]))


def of_packs(model, rows, advantages):
    loss = torch.zeros((), dtype=torch.float64)
    for one in pack(rows, advantages, max_tokens=max(len(each.sequence.token_ids) for each in rows) + 9):
        arrays = as_torch(one)
        n = len(one.token_ids)
        document = torch.bucketize(torch.arange(n), arrays["cu_seqlens"][1:].long(), right=True)
        loss = loss + of_line(model, arrays, causal(n) & (document[:, None] == document[None, :]), torch.arange(n) - 1)
    return with_gradients(model, loss)


def of_padded(model, rows, advantages, *, left):
    loss = torch.zeros((), dtype=torch.float64)
    padded = as_torch(pad(rows, advantages, left=left))
    n = padded["token_ids"].shape[1]
    for arrays in ({name: values[line] for name, values in padded.items()} for line in range(len(rows))):
        allowed = causal(n) & (arrays["attention_mask"][None, :] | torch.eye(n, dtype=torch.bool))
        loss = loss + of_line(model, arrays, allowed, torch.arange(n) - 1)
    return with_gradients(model, loss)


def group(seed):
    """Rows of several random sessions, with their advantages."""
    rows = [one for one in random_rows(seed, sessions=4) if one.sequence.token_ids]
    sessions = sorted({one.trajectory.session for one in rows})
    return rows, [sessions.index(one.trajectory.session) - 1.5 for one in rows]


def agent(turns=6, context=20):
    """One session: a long context, and at each turn a retry that sampled the same first token, and a sub-agent's fork."""
    line, rows = [*range(context)], []
    mask = [0] * context
    for turn in range(turns):
        rows.append(row([*line, 40, 41 + turn], [*([0] * len(line)), 1, 1], sequence=f"retry{turn}"))
        rows.append(row([*line, 50 + turn, 60], [*([0] * len(line)), 1, 1], sequence=f"fork{turn}"))
        line, mask = [*line, 40, 30 + turn, 20 + turn], [*mask, 1, 1, 0]
    return [*rows, row(line, mask, sequence="main")], [0.5 - n / 4 for n in range(2 * turns + 1)]


GROUPS = {**{f"random-{seed}": group(seed) for seed in SEEDS}, "agent": agent()}


@pytest.mark.parametrize("name", GROUPS)
def test_loss_and_gradients_of_the_forest_are_those_of_the_rows(model, name):
    rows, advantages = GROUPS[name]
    wanted = of_rows(model, rows, advantages)
    assert wanted.abs().max() > TOLERANCE, "nothing is trained"
    assert (of_forest(model, rows, advantages) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", GROUPS)
def test_loss_and_gradients_of_packed_and_padded_rows_are_those_of_the_rows(model, name):
    rows, advantages = GROUPS[name]
    wanted = of_rows(model, rows, advantages)
    for other in (of_packs(model, rows, advantages), *(of_padded(model, rows, advantages, left=left) for left in (False, True))):
        assert (other - wanted).abs().max() < TOLERANCE


def test_the_forest_of_an_agent_is_a_fraction_of_its_rows():
    rows, _ = agent()
    assert len(build_forest(rows).token_ids) * 5 < sum(len(one.sequence.token_ids) for one in rows)


@pytest.mark.parametrize("what", ["positions", "mask", "parents", "advantages"])
def test_the_comparison_can_fail(model, what):
    rows, advantages = agent()
    n = len(build_forest(rows).token_ids)
    changes = {
        "positions": {"position_ids": torch.arange(n)},
        "mask": {"allowed": causal(n)},
        "parents": {"parents": torch.arange(n) - 1},
        "advantages": {"advantages": torch.ones(n)},
    }[what]
    assert (of_forest(model, rows, advantages, changes) - of_rows(model, rows, advantages)).abs().max() > TOLERANCE
