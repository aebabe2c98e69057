"""Refusal of prompts with more tokens than the model or the KV cache takes."""

from bisect import bisect_left

from pagedserve._core import Scheduler
from pagedserve.errors import TOO_LONG, RequestError


def check_length(scheduler: Scheduler, num_tokens: int, max_model_len: int, name: str) -> None:
    """Refuse a prompt of ``num_tokens`` tokens if it can never run.

    Raises:
        RequestError: Names the prompt, its length, and what is accepted.
    """
    refusal = scheduler.prompt_refusal(num_tokens)
    if refusal is not None:
        sizes = range(1, max_model_len + 1)
        most = bisect_left(sizes, True, key=lambda size: scheduler.prompt_refusal(size) is not None)
        raise too_long(num_tokens, most=most, max_model_len=max_model_len, why=f"{name} {refusal}")


def too_long(num_tokens: int, *, most: int, max_model_len: int, why: str) -> RequestError:
    """Error for a prompt that is too long, in the words that clients look for.

    Args:
        num_tokens: Tokens of the prompt.
        most: Maximum that is accepted.
        max_model_len: Maximum tokens of a sequence.
        why: Sentence with the reason.
    """
    found = f"{num_tokens} tokens > {most} maximum"
    words = TOO_LONG.format(found=found, max_model_len=max_model_len)
    return RequestError(f"{words}. However, your request resulted in {num_tokens} tokens: {why}")
