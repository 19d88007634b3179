"""Queries NeMo Gym's own model server (nemo-gym 0.7.0): what it sends to vLLM, and what it answers. Needs an interpreter with nemo-gym.

Standard input: a JSON list of questions `{"path": …, "body": …, "refusal": …}`; `refusal` is vLLM's error body (status 400), or absent.
A question `{"validate": …, "body": …}` has an answer of that path parsed by Gym's own class.
Standard output: a JSON list of `{"sent": …, "status": …, "answer": …}` in the same order. `sent` is the body for vLLM's chat completions,
`null` if Gym's server refused the request before that; `answer` is its own answer, as text.
"""

import json
import sys
from typing import Any
from unittest.mock import MagicMock

import nemo_gym.server_utils
from aiohttp import ClientResponseError
from fastapi.testclient import TestClient
from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymResponse
from nemo_gym.server_utils import ServerClient
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "sim",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Hi."},
            "token_ids": [3],
            "logprobs": {"content": [{"token": "token_id:3", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
        }
    ],
}
ANSWERS = {"/v1/chat/completions": NeMoGymChatCompletion, "/v1/responses": NeMoGymResponse}


class Vllm:
    """Replaces Gym's client of vLLM."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] | None = None
        self.refusal: str | None = None

    async def create_chat_completion(self, **body: Any) -> dict[str, Any]:
        self.sent = json.loads(json.dumps(body))
        if self.refusal is not None:
            error = ClientResponseError(MagicMock(), (), status=400)
            error.response_content = self.refusal.encode()
            raise error
        return json.loads(json.dumps(REPLY))


def main() -> None:
    nemo_gym.server_utils.get_global_config_dict = dict
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=1,
        base_url="http://127.0.0.1:1/v1",
        api_key="none",
        model="sim",
        entrypoint="",
        name="",
        return_token_id_information=True,
        uses_reasoning_parser=True,
    )
    server = VLLMModel(config=config, server_client=MagicMock(spec=ServerClient, global_config_dict={}))
    vllm = Vllm()
    server._clients = [vllm]
    client = TestClient(server.setup_webserver(), raise_server_exceptions=False)
    answers = []
    for question in json.load(sys.stdin):
        if "validate" in question:
            ANSWERS[question["validate"]].model_validate(question["body"])
            answers.append({"sent": None, "status": 200, "answer": ""})
            continue
        vllm.sent, vllm.refusal = None, question.get("refusal")
        answer = client.post(question["path"], json=question["body"])
        answers.append({"sent": vllm.sent, "status": answer.status_code, "answer": answer.text})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
