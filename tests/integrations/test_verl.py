"""verl 0.9.1 runs the agent loop: its own worker starts it from a file, pads its outputs and makes a batch of tensors.

Ray, the inference servers and the tokenizer of a model are not needed for this and not started. Run it in an environment with verl and
torch: `make integrations`.
"""

import json

import numpy as np
import pytest

from tests.support.material import require_package
from tests.support.plugin_engine import PluginEngine

agent_loop = require_package("verl", "verl.experimental.agent_loop.agent_loop")

import hydra
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from tests.integrations.kit import branching, guessing_engine, truth
from tests.proxy.kit import proxied
from tokencache.client import AsyncClient
from tokencache.integrations.rollouts import FailedRolloutError
from tokencache.integrations.rows import RowsError
from tokencache.integrations.verl import TokencacheAgentLoop

pytestmark = pytest.mark.ran_with(trainer="verl")
PROMPT, RESPONSE = 64, 512


class Tokenizer:
    """What verl's worker needs of a tokenizer: padding."""

    pad_token_id = 0
    padding_side = "right"

    def pad(self, encoded, *, padding, max_length, return_tensors, return_attention_mask):
        assert (padding, return_tensors) == ("max_length", "pt")
        ids = encoded["input_ids"]
        assert len(ids) <= max_length
        room = [0] * (max_length - len(ids))
        ones = [1] * len(ids)
        left = self.padding_side == "left"
        padded = {"input_ids": torch.tensor([room + ids if left else ids + room])}
        return padded | ({"attention_mask": torch.tensor([room + ones if left else ones + room])} if return_attention_mask else {})


def worker_of(url, tmp_path, **members):
    """verl's worker, without the parts that need Ray; its agent loop comes from a file, as in a training."""
    entry = {"name": "guessing", "_target_": "tokencache.integrations.verl.TokencacheAgentLoop", "url": url}
    path = tmp_path / "agent_loops.json"
    path.write_text(json.dumps([{**entry, "play": "examples.integrations.guessing:play", **members}]))
    for config in OmegaConf.load(path):
        agent_loop._agent_loop_registry[config.name] = config
    rollout = {
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "calculate_log_probs": True,
    }
    rollout |= {"agent": {"default_agent_loop": "guessing"}, "val_kwargs": {"temperature": 0.0, "top_p": 1.0, "top_k": -1}}
    worker = object.__new__(agent_loop.AgentLoopWorker)
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    worker.rollout_config = worker.config.actor_rollout_ref.rollout
    worker.tokenizer, worker.processor, worker.dataset_cls, worker.llm_client, worker.tools = Tokenizer(), None, None, None, []
    worker.hf_model_type, worker.reward_loop_worker_handles, worker.distillation_enabled, worker.mm_processor_kwargs = None, None, False, {}
    return worker


def loop_of(worker):
    """The agent loop of a worker, made as it makes it."""
    return hydra.utils.instantiate(
        agent_loop._agent_loop_registry["guessing"],
        trainer_config=agent_loop.DictConfigWrap(worker.config),
        server_manager=None,
        tokenizer=worker.tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=agent_loop.DictConfigWrap(worker.config.data),
    )


def batch_of(*secrets):
    columns = {
        "raw_prompt": [[{"role": "user", "content": "Guess."}]] * len(secrets),
        "secret": list(secrets),
        "uid": ["u7"] * len(secrets),
    }
    tensors = {name: np.empty(len(secrets), dtype=object) for name in columns}
    for name, values in columns.items():
        tensors[name][:] = values
    return DataProto.from_dict(tensors={"dummy": torch.zeros(len(secrets), 1)}, non_tensors=tensors)


async def test_a_batch_has_the_ids_that_the_engine_used(tmp_path):
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        batch = await worker_of(rig.url, tmp_path, run="mine").generate_sequences(batch_of(2, 9))
        known = truth(rig.engine)
        for place in range(2):
            row = batch[place]
            real, mask = row.batch["attention_mask"].bool(), row.batch["response_mask"].bool()
            ids = row.batch["input_ids"][real].tolist()
            assert tuple(ids) in known
            sampled = known[tuple(ids)]
            assert row.batch["responses"][mask].tolist()[-len(sampled.completion_ids) :] == sampled.completion_ids
            assert row.batch["rollout_log_probs"][mask].tolist()[-len(sampled.logprobs) :] == pytest.approx(sampled.logprobs, abs=1e-6)
            session = row.non_tensor_batch["tokencache"]["session"]
            trajectory = await client.session(session).trajectory()
            assert (trajectory.group, trajectory.state) == ("mine-u7", "sealed")
            assert row.batch["rm_scores"].sum() == trajectory.reward
            assert trajectory.sequences[0].turns[0].sampling["temperature"] == 0.5
        assert batch.batch["rm_scores"].sum(-1).tolist() == [0.75, 0.0]


async def test_a_response_that_is_too_long_ends_after_a_whole_turn(tmp_path):
    async with proxied(guessing_engine()) as rig:
        worker = worker_of(rig.url, tmp_path)
        whole = await worker.generate_sequences(batch_of(9))
        length = int(whole.batch["attention_mask"][:, PROMPT:].sum())
        worker.rollout_config.response_length = length * 2 // 3  # its tokens differ from rollout to rollout
        cut = await worker.generate_sequences(batch_of(9))
        assert cut.batch["responses"].shape[-1] == length * 2 // 3
        assert 0 < cut.batch["response_mask"].sum() < whole.batch["response_mask"].sum()
        assert cut.non_tensor_batch["tokencache"][0]["overlong"] == "cut"


async def test_one_row_of_several_is_a_stated_choice(tmp_path):
    play = "tests.integrations.kit:branching"
    async with proxied(guessing_engine()) as rig:
        with pytest.raises(RowsError, match="rows='main' or rows='longest'"):
            await worker_of(rig.url, tmp_path, play=play, rows="single").generate_sequences(batch_of(2))
        batch = await worker_of(rig.url, tmp_path, play=play, rows="longest").generate_sequences(batch_of(2))
        (labels,) = batch.non_tensor_batch["tokencache"]
        (dropped,) = labels["dropped"]
        assert dropped["trainable_tokens"]
        assert "another row" in dropped["reason"]


async def test_a_row_has_its_images_in_order(tmp_path):
    """As images of Pillow, which verl's worker gives to the processor of the model; and as many tokens for each as the engine used."""
    async with proxied(PluginEngine(seed=7, images="plugin")) as rig:
        worker = worker_of(rig.url, tmp_path, play="tests.integrations.kit:looking", delete=True)
        worker.rollout_config.prompt_length = 256
        output = await loop_of(worker).run({"temperature": 0.5}, uid="u7", width=56)
        assert isinstance(output, agent_loop.AgentLoopOutput)
        assert [(picture.width, picture.getpixel((0, 0))[0]) for picture in output.multi_modal_data["images"]] == [
            (56, 0),
            (156, 100),
            (56, 0),
        ]
        pad, ids = rig.engine.tokenizer.id_of("<|image_pad|>"), [*output.prompt_ids, *output.response_ids]
        placed = output.extra_fields["tokencache"]["media"]
        assert [at for at, token in enumerate(ids) if token == pad] == [
            at for medium in placed for at in range(medium["start"], medium["start"] + medium["length"])
        ]
        assert len(placed) == 3
        assert await rig.store.session(output.extra_fields["tokencache"]["session"]) is None


@pytest.mark.parametrize("harness", ["branching", "rewarding_a_part"])
async def test_the_worker_for_transfer_queue_gets_all_rows(tmp_path, monkeypatch, harness):
    """verl gives the score of the last row to all, so that has the reward of the rollout."""
    stored = {}

    async def put(keys, fields, tags, partition_id):
        assert partition_id == "train"
        stored.update(zip(keys, tags, strict=True))
        stored["fields"] = fields

    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq.async_kv_batch_put", put)
    async with proxied(guessing_engine()) as rig:
        worker = worker_of(rig.url, tmp_path, play=f"tests.integrations.kit:{harness}", rows="all")
        sample = {"uid": "u7", "session_id": 0, "global_steps": 3, "secret": 2}
        outputs = await loop_of(worker).run({"temperature": 0.5}, **sample)
    worker.__class__ = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    await worker._agent_loop_postprocess(outputs, validate=False, **sample)
    assert {key for key in stored if key != "fields"} == {"u7_0_0", "u7_0_1"}
    assert [scores.sum() for scores in stored["fields"]["rm_scores"]] == [0.5, 0.5]
    assert steps_of(stored["u7_0_0"]) == [[2, 2]], "the weights that verl sent before its third step"


async def test_the_last_rows_of_a_group_have_the_rewards_of_their_rollouts(tmp_path):
    """verl compares them, so a rollout of one row must not have another kind of reward than one of two."""
    async with proxied(guessing_engine()) as rig:
        worker = worker_of(rig.url, tmp_path, play="tests.integrations.kit:rewarding_its_only_row", rows="all")
        (output,) = await loop_of(worker).run({"temperature": 0.5}, uid="u7", session_id=0, global_steps=3, secret=2)
    assert output.reward_score == 0.5


def steps_of(tag):
    """The policy versions of a row, as verl's default trainer reads them (`_compute_metrics`)."""
    return np.array([[tag["min_global_steps"], tag["max_global_steps"]]], dtype=int).tolist()


async def test_the_announced_versions_are_verls_steps(tmp_path):
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        await client.set_weights(17)
        output = await loop_of(worker_of(rig.url, tmp_path)).run({"temperature": 0.5}, uid="u7", global_steps=21, secret=2)
        assert steps_of(output.extra_fields) == [[17, 17]]
        older = await loop_of(worker_of(rig.url, tmp_path)).run({"temperature": 0.5}, uid="u7", secret=2)
        assert steps_of(older.extra_fields) == [[17, 17]]


async def breaking(session, sample):
    """A harness that fails for the second rollout of a prompt the first time, and always for the third."""
    await branching(session, sample)
    again = (await session.state()).metadata.get("retry_of")
    if sample["session_id"] == 2 or (sample["session_id"] == 1 and not again):
        raise RuntimeError("the harness broke")
    return sample["session_id"] / 10


async def test_the_worker_for_transfer_queue_leaves_a_failed_rollout_out_of_its_group(tmp_path, monkeypatch):
    """verl marks the prompt as a `failure`, samples the rollouts that are there, and computes their advantages among themselves."""
    queue = {}

    async def put(key, partition_id, tag, fields=None):
        queue.setdefault(partition_id, {}).setdefault(key, {}).update(tag, is_prompt=True, global_steps=1)

    async def put_batch(keys, fields, tags, partition_id):
        queue[partition_id].update(zip(keys, tags, strict=True))
        rewards.update(zip(keys, (float(scores.sum()) for scores in fields["rm_scores"]), strict=True))

    rewards = {}
    tq = "verl.trainer.ppo.v1.agent_loop_tq.tq"
    monkeypatch.setattr(f"{tq}.async_kv_put", put)
    monkeypatch.setattr(f"{tq}.async_kv_batch_put", put_batch)
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq.kv_list", lambda: queue)
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq.kv_clear", lambda **_: None)
    async with proxied(guessing_engine()) as rig, AsyncClient(rig.url) as client:
        worker = worker_of(rig.url, tmp_path, play="tests.integrations.test_verl:breaking", rows="longest", run="mine", retries=1)
        worker.__class__ = AgentLoopWorkerTQ.__ray_metadata__.modified_class
        worker.rollout_config.n = 4
        prompt = {"uid": "u7", "global_steps": 1, "agent_name": "guessing", "raw_prompt": []}
        trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        await worker._run_prompt(prompt, {"temperature": 0.5}, trajectory)
        failed = [state for state in await client.sessions(tag="run:mine") if not state.valid]
    assert [state.outcome for state in failed] == ["harness"] * 3, "one of session 1, two of session 2"
    assert queue["train"]["u7"]["status"] == "failure"
    batch, _ = ReplayBuffer("sync", None, None, "drop", None).sample(1, "train", 1)
    assert sorted(batch.keys) == ["u7_0_0", "u7_1_0", "u7_3_0"]
    assert [steps_of(queue["train"][key]) for key in batch.keys] == [[[0, 0]]] * 3
    scores = torch.tensor([[rewards[key]] for key in batch.keys])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": torch.ones(3, 1)}, non_tensors={"uid": np.array(["u7"] * 3, dtype=object)}
    )
    made = compute_advantage_for_multi_trajectories(data, list(batch.keys), AdvantageEstimator.GRPO).batch["advantages"]
    assert made.flatten().tolist() == pytest.approx(((scores - scores.mean()) / (scores.std() + 1e-6)).flatten().tolist())


async def test_the_worker_of_the_older_trainer_needs_a_row_of_each_sample(tmp_path):
    """A masked row would stand in its group, and verl would compute a reward for it. So the failure is an error."""
    async with proxied(guessing_engine()) as rig:
        worker = worker_of(rig.url, tmp_path, play="tests.integrations.kit:failing")
        with pytest.raises(FailedRolloutError, match=r"harness: session .*the harness broke"):
            await worker.generate_sequences(batch_of(2))


def test_options_are_checked_when_the_worker_starts(tmp_path):
    worker = worker_of("http://127.0.0.1:1", tmp_path)
    needed = {"server_manager": None, "tokenizer": Tokenizer(), "processor": None, "dataset_cls": None}
    needed |= {"trainer_config": agent_loop.DictConfigWrap(worker.config), "data_config": agent_loop.DictConfigWrap(worker.config.data)}
    for options, message in (({"rows": "some"}, "rows"), ({"overlong": "mask"}, "overlong"), ({"play": "nowhere:play"}, "cannot import")):
        with pytest.raises(ValueError, match=message):
            TokencacheAgentLoop(**needed, **{"url": "http://127.0.0.1:1", "play": branching, **options})
