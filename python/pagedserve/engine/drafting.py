"""Draft tokens of a step: proposed, budgeted, and counted after verification.

A step without prompts gets draft tokens if that makes it faster (`pagedserve.drafts.load`): those
that a grammar or a thinking budget forces, else those of the request's prediction while its output
follows it, else those of the proposer.  Sequences whose next token is not one sample from a
function of the tokens before get none: beam searches, and custom logits processors, which may count
their calls.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerConfig, SchedulerOutputs
from pagedserve.config import EngineArgs
from pagedserve.drafts.load import CERTAIN, StepTimes, can_gain, share_out
from pagedserve.drafts.lookup import OutputLookup, TextLookup
from pagedserve.drafts.model import DraftEngine, DraftModel
from pagedserve.drafts.prediction import Prediction
from pagedserve.drafts.proposer import DraftedText, Proposer
from pagedserve.engine.request import Request, Sequence
from pagedserve.engine.stats import EngineStats
from pagedserve.engine.step import Step, StepUpdate
from pagedserve.errors import ConfigError
from pagedserve.tokenizer import Tokenizer

# Weight of one verified draft in the expected acceptance of the next.
_WEIGHT: Final = 0.1
# Weight of a step without drafts, towards the unknown: drafts may be worth trying again.
_FORGETTING: Final = 0.01
_UNKNOWN: Final = 0.5
# Expected acceptance of a prediction before its first draft token.
_PREDICTED: Final = 0.9


class StepDrafts(NamedTuple):
    """Draft tokens of a step, in the scheduler's layout and by sample.

    Attributes:
        rows: Rows with drafts, int32 ``[K]``.
        token_start: Start of each row's draft tokens, int32 ``[K + 1]``.
        tokens: Draft tokens, int32.
        by_sample: Drafts by the first sample of their row.
    """

    rows: NDArray[np.int32]
    token_start: NDArray[np.int32]
    tokens: NDArray[np.int32]
    by_sample: dict[int, list[int]]

    @classmethod
    def of(cls, rows: list[int], drafts: list[list[int]], samples: list[int]) -> Self:
        """Pack the drafts of rows; ``samples`` are their samples in a step without drafts."""
        starts = [0, *accumulate(map(len, drafts))]
        return cls(
            np.array(rows, np.int32),
            np.array(starts, np.int32),
            np.array([token for tokens in drafts for token in tokens], np.int32),
            # Offset by the drafts of earlier rows.
            {
                sample + start: tokens
                for sample, start, tokens in zip(samples, starts, drafts, strict=False)
            },
        )


class Drafter:
    """Requests as many draft tokens from a proposer as are worth their cost."""

    def __init__(
        self,
        proposer: Proposer,
        stats: EngineStats,
        *,
        most: int,
        match_lengths: tuple[int, int],
        max_tokens: int,
        max_len: int,
    ) -> None:
        """Store the components.

        Args:
            proposer: Proposer of draft tokens.
            stats: Counters to update.
            most: Maximum draft tokens per row.
            match_lengths: Minimum number of tokens by which the place in a prediction is found
                again, and maximum number compared.
            max_tokens: Maximum tokens per step.
            max_len: Maximum tokens of a sequence.
        """
        self._proposer = proposer
        self._stats = stats
        self._most = most
        self._match_lengths = match_lengths
        self._max_tokens = max_tokens
        self._max_len = max_len
        self._times = StepTimes()

    def may_draft(self, scheduled: SchedulerOutputs) -> bool:
        """Whether drafts are expected to make a step after this one faster."""
        is_known = self._times.is_known(scheduled.num_rows)
        return not is_known or self._budget(scheduled) > 0

    def propose(
        self,
        scheduled: SchedulerOutputs,
        sequences: list[Sequence],
        rows: NDArray[np.int32],
    ) -> StepDrafts | None:
        """Propose draft tokens for a step.

        Args:
            scheduled: Decisions of the step.
            sequences: Sequence of each sample.
            rows: Row of each sample, ``[S]``.

        Returns:
            The drafts; None if there are none.
        """
        budget = self._budget(scheduled)
        if budget <= 0:
            return None
        texts = [self._text(sequence) for sequence in sequences]
        rooms, chances, known = [], [], []
        for sequence, text in zip(sequences, texts, strict=True):
            room = self._room(sequence)
            forced = _forced(sequence)
            tokens = forced or _predicted(sequence, text, room)
            text.is_predicted = bool(tokens) and not forced
            known.append(tokens)
            rooms.append(min(room, len(tokens)) if tokens else room)
            chances.append(CERTAIN if forced else text.acceptance)
        shares = share_out(self._times, chances, rooms, budget)
        for text, share in zip(texts, shares, strict=True):
            if not share:
                text.acceptance += _FORGETTING * (_UNKNOWN - text.acceptance)
        drafts = [tokens[:share] for tokens, share in zip(known, shares, strict=True)]
        asked = [sample for sample, share in enumerate(shares) if share and not drafts[sample]]
        found = self._proposer.propose(
            [texts[sample] for sample in asked], [shares[sample] for sample in asked]
        )
        for sample, tokens in zip(asked, found, strict=True):
            drafts[sample] = _possible(sequences[sample], tokens)
        drafted = [(sample, tokens) for sample, tokens in enumerate(drafts) if tokens]
        if not drafted:
            return None
        samples = [sample for sample, _ in drafted]
        return StepDrafts.of(rows[samples].tolist(), [tokens for _, tokens in drafted], samples)

    def record(self, step: Step, update: StepUpdate) -> None:
        """Count proposed and accepted draft tokens of a step."""
        for output, sample in enumerate(update.parents):
            tokens = step.drafts.get(sample)
            if tokens is None:
                continue
            sequence, count = update.sequences[output], len(update.accepted.get(output, ()))
            text = self._text(sequence)
            for place in range(min(count + 1, len(tokens))):
                text.acceptance += _WEIGHT * (float(place < count) - text.acceptance)
            metrics = sequence.request.metrics
            metrics.num_draft_tokens += len(tokens)
            metrics.num_accepted_tokens += count
            if text.is_predicted:
                metrics.num_prediction_tokens += len(tokens)
                metrics.num_accepted_prediction_tokens += count
            self._stats.record_drafts(len(tokens), count)

    def observe(self, scheduled: SchedulerOutputs, seconds: float) -> None:
        """Record the duration of a step."""
        if scheduled.num_prefill_groups == 0 and not scheduled.has_moves:
            self._times.observe(scheduled.num_batched_tokens, seconds)

    def end(self, request: Request) -> None:
        """Record the end of a request; one with prompt_logprobs has a unique salt."""
        if request.prompt_logprobs is None:
            for sequence in request.sequences:
                self._proposer.end(self._text(sequence))

    def _text(self, sequence: Sequence) -> DraftedText:
        if sequence.drafted is None:
            request = sequence.request
            prompt, salt = request.prompt_token_ids, request.salt
            sequence.drafted = DraftedText(prompt, sequence.token_ids, salt)
            if request.prediction:
                sequence.drafted.prediction = Prediction(request.prediction, *self._match_lengths)
                sequence.drafted.acceptance = _PREDICTED
        return sequence.drafted

    def _budget(self, scheduled: SchedulerOutputs) -> int:
        """Maximum drafts of a step like this; 0 if drafts cannot make it faster."""
        num_rows = scheduled.num_rows
        if num_rows == 0 or scheduled.num_prefill_groups:
            return 0
        budget = min(self._max_tokens - scheduled.num_batched_tokens, num_rows * self._most)
        return budget if can_gain(self._times, num_rows, budget) else 0

    def _room(self, sequence: Sequence) -> int:
        """Maximum drafts of a sequence, which leave space for one more token."""
        request, num_tokens = sequence.request, len(sequence.token_ids)
        if request.search is not None or request.params.logits_processors:
            return 0
        in_model = self._max_len - len(request.prompt_token_ids) - num_tokens
        return max(0, min(self._most, request.rule.max_tokens - num_tokens - 1, in_model - 1))


def drafter_of(
    args: EngineArgs,
    config: SchedulerConfig,
    stats: EngineStats,
    tokenizer: Tokenizer,
    make_engine: Callable[[EngineArgs], DraftEngine],
) -> Drafter | None:
    """Create the proposer of draft tokens; None without speculative decoding.

    Args:
        args: Options of the engine.
        config: Configuration of the scheduler.
        stats: Counters to update.
        tokenizer: Tokenizer of the model.
        make_engine: Creates the engine of a draft model.

    Raises:
        ConfigError: The draft model has a different vocabulary.
        ModelLoadError: It cannot be found, read or run.
    """
    drafts = args.speculative_config
    if drafts is None:
        return None
    proposer: Proposer
    if drafts.model is not None:
        engine = make_engine(_draft_model_args(args, drafts.model, drafts.kv_cache_memory))
        if engine.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"speculative_config has the model {drafts.model!r}, whose tokens are not those of "
                f"{args.model!r}: give one of the same family"
            )
        proposer = DraftModel(engine)
    elif drafts.method == "suffix":
        proposer = OutputLookup(*drafts.match_lengths)
    else:
        proposer = TextLookup(*drafts.match_lengths)
    return Drafter(
        proposer,
        stats,
        most=drafts.num_speculative_tokens,
        match_lengths=drafts.match_lengths,
        max_tokens=config.max_num_batched_tokens,
        max_len=config.max_model_len,
    )


def _draft_model_args(args: EngineArgs, model: str, kv_cache_memory: int | None) -> EngineArgs:
    return EngineArgs(
        model=model,
        backend=args.backend,
        dtype=args.dtype,
        device=args.device,
        cpu_instructions=args.cpu_instructions,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        hf_token=args.hf_token,
        download_dir=args.download_dir,
        disable_log_stats=True,
    )


def _forced(sequence: Sequence) -> list[int]:
    return sequence.request.row_sampler.forced(sequence.token_ids, sequence.index)


def _predicted(sequence: Sequence, text: DraftedText, most: int) -> list[int]:
    if text.prediction is None:
        return []
    return _possible(sequence, text.prediction.propose(text.token_ids, most))


def _possible(sequence: Sequence, tokens: list[int]) -> list[int]:
    row_sampler = sequence.request.row_sampler
    return row_sampler.possible(sequence.token_ids, sequence.index, tokens)
