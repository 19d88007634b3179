"""Extends Gym's `vllm_model` server so that the calls of each rollout are in one session at the proxy.

Gym's server keeps its functions: it converts Responses and Messages, removes members that vLLM does not read, returns an empty completion
for a prompt that is too long, and captures tokens. Two things are new. Each call names its session in a header, so the proxy supplies
the exact prefix. And each call requests token ids with the completion (`return_token_ids`), so they are the ids that the engine used. Gym
puts them on the output items, where NeMo RL reads them.

Source: nemo-gym 0.7.0, `responses_api_models/vllm_model/app.py` (`VLLMModel._resolve_client`,
`_preprocess_chat_completion_create_params`).
"""

import logging
from typing import Any

from fastapi import Request
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI
from nemo_gym.rollout_correlation import current_rollout_id
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import PrivateAttr
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

from tokencache.integrations.nemo_gym.rollout_session import RolloutSession, session_of

log = logging.getLogger(__name__)


class TokencacheModelConfig(VLLMModelConfig):
    """The settings of Gym's `vllm_model`. Token ids are on by default.

    `base_url` is the URL of the proxy, and `session_header` its `--session-header`.
    """

    return_token_id_information: bool = True
    request_prompt_and_generation_token_ids: bool = True
    uses_reasoning_parser: bool = True
    session_header: str = "X-Tokencache-Session"


class TokencacheModel(VLLMModel):
    """Gym's model server, with the proxy as its engine."""

    config: TokencacheModelConfig
    _lost_rollout_logged: bool = PrivateAttr(default=False)

    def _resolve_client(self, request: Request) -> NeMoGymAsyncOpenAI:
        client = super()._resolve_client(request)
        headers = {**client.default_headers, self.config.session_header: self._session(request).name}
        return client.model_copy(update={"default_headers": headers})

    def _preprocess_chat_completion_create_params(self, request: Request, body_dict: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._preprocess_chat_completion_create_params(request, body_dict)
        if not self._lost_rollout_logged and self._session(request).loses(prepared["messages"]):
            self._lost_rollout_logged = True
            log.warning(
                "%s: a call continues a rollout but has neither a rollout id nor the session cookie, so the engine renders its whole "
                "prompt again and the rollout is not contiguous. Set observability_enabled: true or token_id_capture.enabled: true, which "
                "make Gym's agents send the rollout id. Further calls of this kind are not logged",
                self.config.name,
            )
        return prepared

    def _session(self, request: Request) -> RolloutSession:
        cookie_sent = self.get_session_middleware_key() in request.cookies
        return session_of(current_rollout_id(), request.session[SESSION_ID_KEY], cookie_sent=cookie_sent)
