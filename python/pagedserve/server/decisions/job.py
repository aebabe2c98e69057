"""``POST /v1/systemone``: all questions of a request are one prompt with branches."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from pagedserve.decisions.answers import make_decision
from pagedserve.decisions.prompts import Asked, num_prompt_tokens
from pagedserve.decisions.questions import ParsedQuestion, parse_questions
from pagedserve.decisions.reads import reads_of
from pagedserve.inputs import BranchedPrompt, Prompt
from pagedserve.inputs.branches import READ_PARAMS
from pagedserve.outputs import RequestOutput
from pagedserve.server.context import Context
from pagedserve.server.decisions.protocol import (
    DecisionBody,
    DecisionResponse,
    DecisionUsage,
    QuestionDiagnostics,
)
from pagedserve.server.http.errors import ServerError
from pagedserve.server.job import TokenJob
from pagedserve.server.limits import guessed_num_tokens


@dataclass(slots=True, kw_only=True)
class DecisionJob(TokenJob):
    """A decision.

    Attributes:
        body: Body of the request.
        questions: Its questions.
        prompt: Its prompt, once it is made.
    """

    body: DecisionBody
    questions: Sequence[ParsedQuestion]
    prompt: BranchedPrompt | None = None

    @property
    def num_seqs(self) -> int:
        """Number of sequences that it reserves: one for each question."""
        return len(self.questions)

    @property
    def prompt_field(self) -> str:
        """Name of the field with the state."""
        return "state"

    async def make_prompt(self, asked: Asked) -> list[Prompt]:
        """Make its single prompt."""
        self.prompt = await self.context.text.decision_prompt(asked, num_bytes=self.body.num_bytes)
        return [self.prompt]

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """The single chunk of its response."""
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                last = output
        yield self._text(last)

    def _text(self, output: RequestOutput) -> bytes:
        prompt = self.prompt
        if prompt is None or any(each.label_logprobs is None for each in output.outputs):
            raise ServerError(503, "the request was aborted before it was answered")
        num_tokens, calibration = num_prompt_tokens(prompt), self.context.calibration
        decision = make_decision(self.questions, reads_of(output, prompt), num_tokens, calibration)
        response = DecisionResponse(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            usage=DecisionUsage(input_tokens=num_tokens, output_tokens=len(output.outputs)),
            answers={name: asdict(answer) for name, answer in decision.answers.items()},
            diagnostics={
                name: QuestionDiagnostics(**asdict(found))
                for name, found in decision.diagnostics.items()
            },
        )
        return response.model_dump_json().encode()

    def _count(self, place: int, output: RequestOutput) -> None:
        super(DecisionJob, self)._count(place, output)
        if self.prompt is not None:
            self.usage.prompt_tokens[place] = num_prompt_tokens(self.prompt)


async def decision_job(context: Context, body: DecisionBody, answer_id: str) -> DecisionJob:
    """Validate a decision, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, still loading, or a pooling model.
    """
    model = await context.model_for(body)
    given = {name: question.model_dump() for name, question in body.questions.items()}
    asked = Asked(
        state=body.state,
        questions=parse_questions(given),
        instructions=body.instructions,
        chat_template=context.text.chat_template,
        # Defaults for chats may set enable_thinking, which a decision has not.
        chat_template_kwargs=context.text.variables(
            {"enable_thinking": False, **(body.chat_template_kwargs or {})}
        ),
        cache_salt=body.cache_salt,
    )
    texts = [asked.state_text, *(question.text for question in asked.questions)]
    for text in texts:
        context.text.check_length(text, "the decision")
    job = DecisionJob(
        context=context,
        body=body,
        params=READ_PARAMS,
        prompt_sizes=[sum(map(guessed_num_tokens, texts))],
        make_prompts=lambda: job.make_prompt(asked),
        answer_id=answer_id,
        model=model,
        lora_request=context.adapters.get(model),
        questions=asked.questions,
    )
    return job
