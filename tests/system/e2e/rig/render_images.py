"""Runs vLLM's own renderer with the plugin, without an engine, on models for images: prints as JSON what the engine would get.

usage: python render_images.py REQUESTS.json MODEL_DIR…        in vLLM's environment

Each request is a list of steps: `messages`, and how the ids of the prompt are made from those of vLLM's own rendering (`plan`). Output:
model folder → name of a request → `own` (vLLM's rendering) and `given` (with the plugin's ids), or `refused` with the error.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.renderers.online_renderer import OnlineRenderer

from tokencache.core.expansion import compact, learn_placeholder
from tokencache_vllm.images import MEMBER, patch_images


def shown(engine_input):
    """What the engine would get, as plain values."""
    places = engine_input.get("mm_placeholders", {}).get("image", ())
    return {
        "ids": list(engine_input["prompt_token_ids"]),
        "places": [[one.offset, one.length] for one in places],
        "masks": [None if one.is_embed is None else one.is_embed.tolist() for one in places],
        "hashes": engine_input.get("mm_hashes", {}).get("image", []),
    }


class Model:
    """One model's renderer."""

    def __init__(self, folder):
        config = AsyncEngineArgs(model=folder, load_format="dummy", enforce_eager=True, max_model_len=16384).create_engine_config()
        self.renderer = renderer_from_config(config)
        self.online = OnlineRenderer(
            config.model_config,
            self.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )

    async def expand(self, ids, messages):
        """What the engine would get from `/inference/v1/generate` for compact ids and the images of messages."""
        tracker = AsyncMultiModalItemTracker(self.online.model_config)
        parser = tracker.create_parser()
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    parser.parse_image(part["image_url"]["url"], None)
        data, _ = await tracker.resolve_items()
        (engine_input,) = await self.renderer.render_cmpl_async([TokensPrompt(prompt_token_ids=ids, multi_modal_data=data)])
        return shown(engine_input)

    async def compact(self, messages):
        """vLLM's own rendering before it replaces placeholders."""
        params = ChatCompletionRequest(model="tiny", messages=messages).build_chat_params(None, "auto")
        _, prompt = await self.renderer.render_messages_async(messages, params)
        return prompt.get("prompt_token_ids") or self.renderer.tokenizer.encode(prompt["prompt"], add_special_tokens=False)

    async def generate(self, messages, reply):
        """A prompt with a drifted reply, sent as compact ids: what was meant (`sent`, `own`), and what the engine would get (`given`)."""
        own = await self.render(messages)
        placeholder = learn_placeholder(own["ids"], own["places"], await self.compact(messages))
        if placeholder is None:
            return {"own": own, "refused": "images are more than replacements of a placeholder"}
        ids, own["places"] = self.drifted_reply(own["ids"], own["places"], reply)
        return {"own": own, "sent": ids, "given": await self.expand(compact(ids, own["places"], placeholder), messages)}

    async def render(self, messages, **prompt):
        transfer = {"kv_transfer_params": {MEMBER: prompt}} if prompt else {}
        _, (engine_input,) = await self.online.render_chat(ChatCompletionRequest(model="tiny", messages=messages, **transfer))
        return shown(engine_input)

    def drifted(self, ids, reply):
        """The ids with the words of a reply in another tokenization: each of its characters by itself."""
        encode = self.renderer.tokenizer.encode
        usual, other = encode(reply, add_special_tokens=False), [token for c in reply for token in encode(c, add_special_tokens=False)]
        (at,) = [at for at in range(len(ids)) if ids[at : at + len(usual)] == usual]
        return [*ids[:at], *other, *ids[at + len(usual) :]], at + len(other)

    async def chain(self, turns, reply):
        """A conversation that grows, with every reply drifted: for each turn its ids, and what the engine would get, by both routes."""
        messages, found = [], []
        for turn in turns:
            messages.append(turn)
            own = await self.render(messages)
            placeholder = learn_placeholder(own["ids"], own["places"], await self.compact(messages))
            ids, places = own["ids"], own["places"]
            for _ in range(len(messages) // 2):
                ids, places = self.drifted_reply(ids, places, reply)
            exact = await self.render(messages, ids=ids, ranges={"image": places[:1]})
            sent = await self.expand(compact(ids, places, placeholder), messages) if placeholder is not None else None
            found.append({"sent": ids, "plugin": exact["ids"], "generate": sent and sent["ids"]})
            messages.append({"role": "assistant", "content": reply})
        return found

    def drifted_reply(self, ids, places, reply):
        """The ids and the places of images, with the first reply that is not drifted yet tokenized character by character."""
        encode = self.renderer.tokenizer.encode
        usual, other = encode(reply, add_special_tokens=False), [token for c in reply for token in encode(c, add_special_tokens=False)]
        at = next(at for at in range(len(ids)) if ids[at : at + len(usual)] == usual)
        more = len(other) - len(usual)
        return [*ids[:at], *other, *ids[at + len(usual) :]], [[start + (more if start > at else 0), length] for start, length in places]

    async def answer(self, request):
        """The own rendering of a request, and that with the plugin's ids.

        `supplied` are the messages of the ids, if they are not those of the request. `sampled`: an embedding's id behind the reply:
        "named" or "hidden".
        """
        if request.get("chain"):
            return await self.chain(request["chain"], request["drift"])
        if request.get("generate"):
            return await self.generate(request["messages"], request["drift"])
        own = await self.render(request.get("supplied") or request["messages"])
        ids, end, prompt = own["ids"], None, {}
        if "drift" in request:
            ids, end = self.drifted(ids, request["drift"])
        if "sampled" in request:
            (start, length), mask = own["places"][0], own["masks"][0] or [True]
            assert start + length < end
            ids = [*ids[:end], own["ids"][start + mask.index(True)], *ids[end:]]
            prompt = {"sampled": [end]} if request["sampled"] == "named" else {}
        if "ranges" in request:
            prompt["ranges"] = {"image": [[start + request["ranges"], length] for start, length in own["places"][:1]]}
        if request.get("compact"):
            for start, length in reversed(own["places"]):
                ids = [*ids[: start + 1], *ids[start + length :]]
        try:
            return {"own": own, "sent": ids, "given": await self.render(request["messages"], ids=ids, **prompt)}
        except VLLMValidationError as error:
            return {"own": own, "sent": ids, "refused": str(error), "parameter": error.parameter}


async def answer_all(asked, *folders):
    """Prints the answers of all models."""
    assert patch_images("0.32.0")
    answers = {}
    for folder in folders:
        model = Model(folder)
        answers[Path(folder).name] = {name: await model.answer(request) for name, request in asked.items()}
    print(json.dumps(answers), flush=True)


asyncio.run(answer_all(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), *sys.argv[2:]))
os._exit(0)  # threads of vLLM's renderers would go on
