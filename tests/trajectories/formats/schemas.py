"""The types that trainers accept, copied from their own classes if those cannot be installed together with this project.

* `GymResult`, `GymMessages`: nemo-gym 0.7.0 (needs Python 3.13.14, openai 2.44 and Ray), `nemo_gym/openai_utils.py` and
  `base_resources_server.py`. The response is the class of openai, as there. The items are stricter here: unknown members are refused.
* `Trace`: verifiers 0.4.0 (needs openai < 3), `verifiers/v1/trace.py`, `graph.py`, `types.py`: the members that are written.

`test_verifiers` and `test_nemo_gym` also run the real classes on all of `rollouts.ROLLOUTS` if these packages are installed.
"""

from typing import Annotated, Any, Literal

from openai.types.responses import FunctionTool, Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Tokens(Strict):
    """`TokenIDLogProbMixin`: all three or none (`_validate_atomic_token_metadata`)."""

    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None

    @model_validator(mode="after")
    def atomic(self):
        there = {self.prompt_token_ids is None, self.generation_token_ids is None, self.generation_log_probs is None}
        assert len(there) == 1
        return self


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"]


Input = str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]


class InputMessage(Strict):
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    content: Input


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(Tokens):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class Summary(Strict):
    type: Literal["summary_text"]
    text: str


class Reasoning(Tokens):
    type: Literal["reasoning"]
    id: str
    summary: list[Summary]


class FunctionCall(Tokens):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Input


Item = InputMessage | OutputMessage | Reasoning | FunctionCall | FunctionCallOutput


class GymRequest(Strict):
    """`NeMoGymResponseCreateParamsNonStreaming`, which forbids other members."""

    input: list[Item]
    model: str
    tools: list[FunctionTool]
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None


class GymResponse(Response):
    output: list[Item]


class GymResult(BaseModel):
    """`BaseVerifyRequest`: the input of verification. The reward is added afterwards."""

    responses_create_params: GymRequest
    response: GymResponse


class Function(Strict):
    name: str
    arguments: str


class ChatCall(Strict):
    id: str
    type: Literal["function"]
    function: Function


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Content = str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class Heard(Strict):
    role: Literal["system", "user"]
    content: Content
    name: str = ""


class Told(Strict):
    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str


class Said(Tokens):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[ChatCall] | None = None


GymMessages = TypeAdapter(list[Annotated[Heard | Told | Said, Field(discriminator="role")]])


class ToolCall(Strict):
    id: str
    name: str
    arguments: str


class Spoken(Strict):
    role: Literal["system", "user"]
    content: Content


class Answer(Strict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None


class Result(Strict):
    role: Literal["tool"]
    tool_call_id: str
    content: Content


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Node(Strict):
    """`MessageNode`: tokens, mask and log probabilities in step, the last "equals the number of True entries in `mask`"."""

    parent: int | None
    tools: list[Tool] = []
    message: Annotated[Spoken | Answer | Result, Field(discriminator="role")]
    timestamp: float
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []

    @model_validator(mode="after")
    def in_step(self):
        assert len(self.token_ids) == len(self.mask)
        assert len(self.logprobs) == sum(self.mask)
        assert self.sampled or not self.mask
        return self


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int


class Span(Strict):
    start: float
    end: float


class ModelCall(Strict):
    node: int
    model: str
    sampling: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    usage: Usage
    time: Span


class TaskData(Strict):
    id: str


class Task(Strict):
    type: str
    data: TaskData


class AgentConfig(Strict):
    model: str | None


class Agent(Strict):
    config: AgentConfig


class Error(Strict):
    type: str
    message: str


class Timing(Strict):
    start: float


class Score(Strict):
    """`Reward` of verifiers 0.4.0."""

    score: float
    weight: float


class Trace(Strict):
    version: Literal[1]
    id: str
    task: Task
    agent: Agent
    tools: list[Tool]
    nodes: list[Node]
    mm_token_type_id_map: dict[str, int]
    calls: list[ModelCall]
    rewards: dict[str, Score]
    metrics: dict[str, float]
    info: dict[str, Any]
    is_completed: bool
    ok: bool
    errors: list[Error]
    timing: Timing
