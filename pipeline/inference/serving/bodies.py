"""The bodies of requests, as OpenAI's clients write them. A field that this server does not have is refused by name."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.responses import JSONResponse

from pipeline.generation.rollouts import Sampling

MAX_CHOICES = 16  # answers to each prompt. Chosen by hand.
Ids = list[Annotated[int, Field(ge=0)]]
B = TypeVar("B", bound=BaseModel)


class ApiError(Exception):
    """An answer to a request that cannot be served.

    status: HTTP status.
    code: the kind of error, in OpenAI's words.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def content(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"error": {"message": str(self), "type": self.code, "code": self.status}}

    def response(self, *, closes: bool = False) -> JSONResponse:
        """Return the answer; `closes`: it ends the connection, since the request's body may be of any length."""
        headers = {"connection": "close"} if closes else {}
        headers |= {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(self.content(), self.status, headers)


class StreamOptions(BaseModel):
    """Settings of a stream."""

    include_usage: bool = False


class SamplingBody(BaseModel):
    """The fields that chats and completions share. Penalties and biases are accepted where they change nothing."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=0, lt=2**31)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, Literal[0]] | None = None
    store: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Drop null fields: clients send them for fields that are not given."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @field_validator("temperature")
    @classmethod
    def _divides(cls, value: float) -> float:
        if 0 < value < 1e-4:
            raise ValueError("expected 0 or at least 0.0001")
        return value

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Return the settings of the answers. Raises ApiError."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(texts) > 16 or not all(0 < len(text) <= 1000 for text in texts):
            raise ApiError(400, "stop: expected at most 16 texts of 1 to 1,000 characters")
        return Sampling(max_new_tokens, self.temperature, self.top_p, max(self.top_k, 0), texts)


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingBody):
    """The body of /v1/completions. A prompt is a text or token ids; several are answered in one request."""

    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: bool = False
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _answers_something(self) -> Self:
        if not self.prompt:
            raise ValueError("prompt: is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo")
        if self.stream and self.echo:
            raise ValueError("echo: is not streamed")
        if self.echo and self.logprobs is not None and self.temperature not in (0, 1):
            raise ValueError("temperature: expected 0 or 1, at which the log-probabilities of an echo are")
        return self

    @property
    def limit(self) -> int:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | Ids]:
        """Each prompt."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[list-item,arg-type]


class ScoreBody(BaseModel):
    """The body of /v1/score: conversations that end with an assistant's turn."""

    model_config = ConfigDict(extra="forbid")

    model: str
    conversations: list[list[dict[str, Any]]] = Field(min_length=1, max_length=64)


class Candidate(BaseModel):
    """An answer that was voted on."""

    model_config = ConfigDict(extra="forbid")

    model: str
    text: str


class VoteBody(BaseModel):
    """The body of /v1/votes: a prompt, two answers, and which of them is better (None: neither)."""

    model_config = ConfigDict(extra="forbid")

    prompt: list[dict[str, Any]]
    answers: tuple[Candidate, Candidate]
    choice: Literal[0, 1] | None
    blind: bool = False


def parse(kind: type[B], content: bytes) -> B:
    """Read a body. Raises ApiError that names the first field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:2])
        raise ApiError(400, f"{where[:80]}: {first['msg']}" if where else str(first["msg"])) from None
