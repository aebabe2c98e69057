"""Request and response of a decision, in the form of vLLM's structured decisions."""

from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from pagedserve.decisions.questions import QuestionType
from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.protocol import ABSENT, EngineBody

# Media of the state, which are not supported, and the values that attach none.
_MEDIA: Final[dict[str, tuple[object, ...]]] = dict.fromkeys(("images", "audio", "videos"), ([],))


class QuestionBody(NullsLeftOut):
    """A question about the state."""

    model_config = ConfigDict(extra="forbid")

    type: QuestionType
    instructions: Any = ""
    criteria: Any = None


class DecisionBody(EngineBody):
    """``POST /v1/systemone``.

    Attributes:
        state: What the questions are about: a text, or a JSON value.
        questions: Questions by id.
        instructions: System message before the state.
        chat_template_kwargs: Further variables of the chat template.
        cache_salt: Salt of the prompt in the prefix cache.
    """

    absent: ClassVar[dict[str, tuple[object, ...]]] = ABSENT | _MEDIA

    state: Any
    questions: dict[str, QuestionBody]
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_nulls_out(cls, given: Any) -> Any:
        """Treat null as a missing field, except for the state, which may be any value."""
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if value is not None}
        return kept | {"state": None} if "state" in given and given["state"] is None else kept


class DecisionUsage(BaseModel):
    """Tokens of a decision.

    Attributes:
        input_tokens: Tokens of the prompts of all questions, the state counted in each.
        output_tokens: One token for each question.
    """

    input_tokens: int
    output_tokens: int


class QuestionDiagnostics(BaseModel):
    """How well the labels of a question caught the model's reply.

    Attributes:
        label_mass: Probability of all labels together in the whole vocabulary.
        argmax_is_label: Whether the most likely token is a label.
    """

    label_mass: float
    argmax_is_label: bool


class DecisionResponse(BaseModel):
    """Answers to the questions, by their ids.

    Attributes:
        id: Id of the response.
        object: Kind of the response.
        created: Seconds of the wall clock.
        model: Name of the model or adapter.
        answers: Answer to each question; its fields depend on its type.
        usage: Tokens of the decision.
        diagnostics: Diagnostics of each question.
    """

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: DecisionUsage
    diagnostics: dict[str, QuestionDiagnostics]
