"""Bases and records of verl's tools and interactions, and its decorator for tools that are plain functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Schema(BaseModel):
    """A part of a JSON schema: keys that are not named here are kept."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Schema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """A tool as it is offered to the model."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The answer of a tool: a text, and lists of pictures and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"pictures and videos are given in a list, and not as {type(value).__name__}")
        return value

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """The base of tool classes: one object for all episodes, an instance id for each."""

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema: give it one in the file of tools")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema; a class without a tool_schema in its file overrides this."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None: ...


class BaseInteraction:
    """The base of interactions: the other side of a conversation."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.name = str(config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, *_: Any, **__: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *_: Any, **__: Any) -> None: ...


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it is: calls are traced by ``tracking``, not one by one."""
    return function


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A plain function that the model may call."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.fn)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
) -> Any:
    """Register a function as a tool: ``@function_tool``, ``@function_tool("name")`` or with a schema of one's own.

    Without a schema it is built from the signature's types and the docstring's ``Args:``, by transformers as in verl.

    Raises: ValueError for a second function of the name, and for ``*args`` and ``**kwargs``; transformers' own errors for a
        parameter without a type or a description.
    """
    if callable(name):
        return _registered(name, name.__name__, schema)
    return lambda function: _registered(function, name or function.__name__, schema)


def _registered(
    function: Callable[..., Any], name: str, schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None
) -> Callable[..., Any]:
    if not isinstance(schema, OpenAIFunctionToolSchema):
        schema = OpenAIFunctionToolSchema.model_validate(schema or _schema_of(function, name))
    if name in FUNCTION_TOOL_REGISTRY and FUNCTION_TOOL_REGISTRY[name].fn is not function:
        raise ValueError(f"two functions are registered as the tool {name!r}: rename one of them")
    FUNCTION_TOOL_REGISTRY[name] = FunctionTool(name, function, schema)
    return function


def _schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema  # seconds to import

    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if found := [each.name for each in inspect.signature(function).parameters.values() if each.kind in open_ended]:
        raise ValueError(f"the tool {name!r} takes {', '.join(found)}, which no schema can say: name its parameters")
    made = get_json_schema(function)
    return {**made, "function": {**made["function"], "name": name}}


def answer_of(returned: Any) -> tuple[Any, float]:
    """Return the answer and the reward that a function returned: an answer alone, or with a reward and metrics.

    Raises: TypeError for a tuple of another length.
    """
    if not isinstance(returned, tuple):
        return _response(returned), 0.0
    if not 1 <= len(returned) <= 3:
        raise TypeError(f"a tool returns an answer, a reward and metrics, and not {len(returned)} values")
    reward = returned[1] if len(returned) > 1 else None
    return _response(returned[0]), 0.0 if reward is None else float(reward)


def _response(value: Any) -> Any:
    if hasattr(value, "text") and hasattr(value, "image"):  # an installed verl's ToolResponse, too
        return value
    return ToolResponse(text=json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))
