"""Forms of a prompt, and their conversion to text and token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NotRequired, SupportsIndex, TypeAlias, TypedDict, TypeVar

import pagedserve.checks as checks
from pagedserve.errors import RequestError
from pagedserve.inputs.audio import Audio, audio_of
from pagedserve.inputs.branches import BranchedPrompt, ParsedBranch
from pagedserve.inputs.images import images_of
from pagedserve.inputs.speech import NOTHING_REQUESTED, RequestedSpeech, SpeechTask
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.vllm_names import changes_nothing, refuse_arguments

if TYPE_CHECKING:
    from pagedserve.inputs.images import GivenImage

P = TypeVar("P", SamplingParams, PoolingParams)


class TextPrompt(TypedDict):
    """A prompt given as text.

    Attributes:
        prompt: Text of the prompt.
        text_pair: A second text, for models that compare two.
        cache_salt: Prompts share cached prefixes only with prompts of an equal salt, or of none.
        multi_modal_data: ``{"image": ...}``, one Pillow image or a list; the text has the model's
            image token for each.  ``{"audio": (samples, sampling_rate)}`` is the input of an
            encoder, and the text is the decoder's.
        multi_modal_uuids: vLLM's names of cached images, without effect.
        speech_language: Code of the language of audio, where the prompt does not set it; None lets
            the model detect it.
        speech_task: Task for such audio; None is "transcribe".
        speech_timestamps: Whether the transcript of such audio has timestamps.
    """

    prompt: str
    text_pair: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    speech_language: NotRequired[str | None]
    speech_task: NotRequired[SpeechTask]
    speech_timestamps: NotRequired[bool]


class TokensPrompt(TypedDict):
    """A prompt given as token ids, to which no start token or other token is added.

    Attributes:
        prompt_token_ids: Token ids of the prompt.
        prompt: Text of the tokens, used only in the output.
        cache_salt: As in ``TextPrompt``.
        multi_modal_data: As in ``TextPrompt``; the ids have one image token for each image.
        multi_modal_uuids: As in ``TextPrompt``.
        speech_language: As in ``TextPrompt``.
        speech_task: Likewise.
        speech_timestamps: Likewise.
    """

    prompt_token_ids: Sequence[SupportsIndex]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    speech_language: NotRequired[str | None]
    speech_task: NotRequired[SpeechTask]
    speech_timestamps: NotRequired[bool]


SingletonPrompt: TypeAlias = str | Sequence[SupportsIndex] | TextPrompt | TokensPrompt


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Prompts of encoder and decoder; a prompt of another form is the encoder's.

    Attributes:
        encoder_prompt: Input of the encoder.
        decoder_prompt: Prefix of the decoder's output, after its start token; None is the start
            token, and the forced token after it if the model's generation config has one.
    """

    encoder_prompt: SingletonPrompt
    decoder_prompt: SingletonPrompt | None


DictPrompt: TypeAlias = TextPrompt | TokensPrompt | BranchedPrompt | ExplicitEncoderDecoderPrompt
Prompt: TypeAlias = str | Sequence[SupportsIndex] | DictPrompt
# One prompt or several; with two kinds of sequences mypy would infer no list of dictionaries.
Prompts: TypeAlias = str | DictPrompt | Sequence[Prompt | SupportsIndex]


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt after its form was checked: text to be tokenized unless there are token ids.

    ``salt`` separates it in the prefix cache; 0 is the salt of all without one.  ``images`` are
    Pillow images or files, ``audio`` is for an encoder, ``speech`` is what is requested of it,
    ``text_pair`` is a second text that is tokenized with the first, ``branches`` continue the
    token ids.
    """

    text: str | None
    token_ids: Sequence[SupportsIndex] | None
    salt: int = 0
    images: "tuple[GivenImage, ...]" = ()
    audio: Audio | None = None
    speech: RequestedSpeech = NOTHING_REQUESTED
    text_pair: str | None = None
    encoder: "ParsedPrompt | None" = None
    branches: tuple[ParsedBranch, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A tokenized prompt.

    Attributes:
        text: Text as given; None if only token ids were.
        token_ids: At least one id, each within the vocabulary.
        salt: As in ``ParsedPrompt``.
        pair_start: Index of the first token of the second text; None if there is none.
    """

    text: str | None
    token_ids: list[int]
    salt: int = 0
    pair_start: int | None = None


def parse_prompts(prompts: object, prompt_token_ids: object = None) -> list[ParsedPrompt]:
    """Parse the two ways to give prompts into one list.

    Args:
        prompts: One prompt or a sequence of them (``Prompt``), or None.  A list of integers is
            one prompt.
        prompt_token_ids: One list of token ids or a list of such lists, or None.

    Raises:
        RequestError: Both or neither given, an empty list, or a form that is not accepted.
    """
    if prompts is not None and prompt_token_ids is not None:
        raise RequestError("prompts and prompt_token_ids are both given; give one of them")
    if prompts is None and prompt_token_ids is None:
        raise RequestError("no prompts: give prompts or prompt_token_ids")
    if prompts is None:
        return _parse_token_lists(prompt_token_ids)
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts, "the prompt")]
    listed = _listed(prompts)
    if listed is None:
        raise RequestError(f"prompts is {_shown(prompts)}; it must be {_ACCEPTED}, or a list")
    if not listed:
        raise RequestError("no prompts: the list is empty; give at least one")
    if all(isinstance(item, SupportsIndex) and not hasattr(item, "__len__") for item in listed):
        return [parse_prompt(listed, "the prompt")]
    return [parse_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(listed)]


def parse_prompt(prompt: object, name: str) -> ParsedPrompt:
    """Parse one prompt.

    Args:
        prompt: A string, a list of token ids, ``{"prompt": "..."}`` or
            ``{"prompt_token_ids": [...]}``, whose "prompt" is only shown; both may have a
            "cache_salt" and "multi_modal_data".
        name: Name of the prompt in errors.

    Raises:
        RequestError: Another form, or an unsupported key, by name.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        if _listed(prompt) is None:
            raise RequestError(f"{name} is {_shown(prompt)}; it must be {_ACCEPTED}")
        return ParsedPrompt(None, _token_list(prompt, name))
    if any(key in prompt for key in _PAIR):
        return _parse_pair(prompt, name)
    if "branches" in prompt:
        return _parse_branches(prompt, name)
    _refuse_absent(prompt, name)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None and token_ids is None) or not isinstance(text, str | None):
        raise RequestError(f"{name} is {_shown(prompt)}; it must be {_ACCEPTED}")
    if token_ids is not None:
        token_ids = _token_list(token_ids, name)
    pair = prompt.get("text_pair")
    if pair is not None and (not isinstance(pair, str) or token_ids is not None):
        raise RequestError(
            f"text_pair of {name} is {_shown(pair)}; it must be a string, beside a text"
        )
    images, audio = _parse_media(prompt.get("multi_modal_data"), name)
    salt = _salt(prompt.get("cache_salt"), name)
    speech = RequestedSpeech.of(prompt, name)
    return ParsedPrompt(text, token_ids, salt, images, audio, speech, pair)


def _parse_media(data: Any, name: str) -> "tuple[tuple[GivenImage, ...], Audio | None]":
    if data is None:
        return (), None
    if not isinstance(data, Mapping) or set(data) - {"image", "audio"}:
        keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise RequestError(
            f'multi_modal_data of {name} has {keys}; it must be {{"image": ...}} or '
            '{"audio": ...}'
        )
    return images_of(data.get("image"), name), audio_of(data.get("audio"), name)


def _parse_pair(prompt: Mapping[str, object], name: str) -> ParsedPrompt:
    """Parse an encoder prompt with its optional decoder prompt."""
    for key in prompt:
        if key not in _PAIR:
            raise RequestError(
                f"{name} has the key {key!r}; beside {_PAIR[0]} accepted is {_PAIR[1]}"
            )
    encoder = parse_prompt(prompt.get("encoder_prompt"), f"the encoder_prompt of {name}")
    given, decoder = prompt.get("decoder_prompt"), ParsedPrompt(None, None)
    if given is not None:
        decoder = parse_prompt(given, f"the decoder_prompt of {name}")
    if encoder.encoder or decoder.encoder:
        raise RequestError(f"{name} has an encoder_prompt within another; it must be {_ACCEPTED}")
    return replace(decoder, encoder=encoder)


def _parse_branches(prompt: Mapping[str, Any], name: str) -> ParsedPrompt:
    """Parse a prompt with branches.

    Raises:
        RequestError: Another form than that of ``BranchedPrompt``.
    """
    branches = _listed(prompt["branches"])
    if not branches or not all(_is_branch(branch) for branch in branches):
        raise RequestError(
            f"branches of {name} is {_shown(prompt['branches'])}; it must be a list of at least "
            'one {"prompt_token_ids": [...], "label_token_ids": [...]}'
        )
    if unknown := prompt.keys() - BranchedPrompt.__annotations__.keys():
        raise RequestError(f"{name} has branches and {sorted(unknown)}, which cannot go together")
    parsed = [
        ParsedBranch(
            *(
                _integers(_token_list(branch[key], f"branch {index} of {name}"), f"{key} of {name}")
                for key in _BRANCH
            )
        )
        for index, branch in enumerate(branches)
        if isinstance(branch, Mapping)
    ]
    token_ids = _token_list(prompt.get("prompt_token_ids"), name)
    salt = _salt(prompt.get("cache_salt"), name)
    return ParsedPrompt(None, token_ids, salt, branches=tuple(parsed))


def _is_branch(branch: object) -> bool:
    return isinstance(branch, Mapping) and branch.keys() == set(_BRANCH)


def _refuse_absent(prompt: Mapping[str, object], name: str) -> None:
    for key, value in prompt.items():
        if key in _ABSENT_KEYS and not changes_nothing(key, value):
            raise RequestError(
                f"{name} has {key}, which is not supported: prompts are text, token ids and images"
            )
        if key not in (*_KEYS, *_ABSENT_KEYS):
            raise RequestError(f"{name} has the key {key!r}; accepted are {', '.join(_KEYS)}")


def _salt(value: object, name: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"cache_salt of {name} is {_shown(value)}; it must be a string of at least one "
            "character, or None",
            param="cache_salt",
        )
    return salt_of(value.encode("utf-8", "surrogatepass"))


def salt_of(content: bytes) -> int:
    """Salt of prompts that share cached prefixes if their contents are equal."""
    from hashlib import blake2b  # which loads OpenSSL

    digest = blake2b(content, digest_size=8).digest()
    # The upper half is for prompts that share cached prefixes with no other.
    return int.from_bytes(digest, "big") >> 1 or 1


def tokenize_prompt(
    prompt: ParsedPrompt, name: str, *, encode: Callable[[str], list[int]], vocab_size: int
) -> TokenizedPrompt:
    """Tokenize a prompt and check its token ids.

    Args:
        prompt: Prompt from ``parse_prompts``.
        name: Name of the prompt in errors.
        encode: Function of the tokenizer that encodes with special tokens.
        vocab_size: Vocabulary size; ids must be below it.

    Raises:
        RequestError: An empty prompt, or ids that are not integers within the vocabulary.
    """
    if prompt.token_ids is None:
        text = prompt.text or ""
        check_unicode(text, name)
        token_ids = encode(text) if text else []
    else:
        token_ids = _integers(prompt.token_ids, name)
    if not token_ids:
        raise RequestError(f"{name} is empty; it must have at least one token")
    check_range(token_ids, name, vocab_size)
    return TokenizedPrompt(prompt.text, token_ids, prompt.salt)


def checked_token_ids(value: object, name: str, vocab_size: int) -> list[int]:
    """Check token ids given by a caller; the list may be empty, each id within the vocabulary."""
    token_ids = _integers(_token_list(value, name), name)
    check_range(token_ids, name, vocab_size)
    return token_ids


def check_range(token_ids: Sequence[int], name: str, vocab_size: int) -> None:
    """Check that token ids are within the vocabulary; ``name`` is that of their list in errors.

    Raises:
        RequestError: One is not.
    """
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"token {index} of {name} is {token_ids[index]}; token ids must be from 0 to "
            f"{vocab_size - 1}, the last of the vocabulary"
        )


def match_params(
    given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Match sampling parameters to prompts: one for all, or one each; None is the default.

    Raises:
        RequestError: A number that differs from that of prompts, or not ``SamplingParams``.
    """
    return _matched("sampling_params", SamplingParams, given, num_prompts)


def match_pooling_params(
    given: PoolingParams | Sequence[PoolingParams] | None, num_prompts: int
) -> list[PoolingParams]:
    """Match pooling parameters to prompts; see ``match_params``."""
    return _matched("pooling_params", PoolingParams, given, num_prompts)


def _matched(name: str, kind: type[P], given: object, num_prompts: int) -> list[P]:
    if given is None:
        given = kind()
    if isinstance(given, kind):
        return [given] * num_prompts
    accepted = f"one {kind.__name__} for all prompts or a list with one a prompt"
    listed = _listed(given)
    matched = [params for params in listed or () if isinstance(params, kind)]
    if listed is None or len(matched) != len(listed):
        raise RequestError(f"{name} is {_shown(given)}; it must be {accepted}")
    if len(listed) != num_prompts:
        raise RequestError(f"{len(listed)} {name} for {num_prompts} prompts; it must be {accepted}")
    return matched


def match_priorities(priority: object, num_prompts: int) -> list[int]:
    """Match priorities to prompts: one for all, or one each; None is 0.

    Raises:
        RequestError: A number that differs from that of prompts, or not integers.
    """
    if priority is None or isinstance(priority, int):
        return [check_priority("priority", priority or 0)] * num_prompts
    priorities = checks.each(check_priority, "an integer or a list with one a prompt")(
        "priority", priority
    )
    if len(priorities) != num_prompts:
        raise RequestError(
            f"{len(priorities)} priorities for {num_prompts} prompts; give one for all or one each"
        )
    return list(priorities)


_check_options = checks.optional(checks.mapping)


def truncation_of(tokenization_kwargs: Mapping[str, Any] | None) -> int | None:
    """Return ``truncate_prompt_tokens`` of ``tokenization_kwargs``.

    Raises:
        RequestError: They have other options that change something.
    """
    options = dict(_check_options("tokenization_kwargs", tokenization_kwargs) or {})
    truncation: int | None = options.pop("truncate_prompt_tokens", None)
    if options.get("add_special_tokens") is True:  # as always
        del options["add_special_tokens"]
    refuse_arguments({"tokenization_kwargs": options})
    return truncation


# Of a request; the core's integers have 64 bits.
check_priority = checks.integer(
    "of 64 bits; the lowest is served first", low=-(2**63), high=2**63 - 1
)
_ACCEPTED = 'a string, a list of token ids, {"prompt": "..."} or {"prompt_token_ids": [...]}'
_KEYS = (
    "prompt",
    "prompt_token_ids",
    "text_pair",
    "cache_salt",
    "multi_modal_data",
    "multi_modal_uuids",
    "speech_language",
    "speech_task",
    "speech_timestamps",
)
_ABSENT_KEYS = (
    "mm_processor_kwargs",
    "prompt_embeds",
    "token_type_ids",
)
_PAIR = ("encoder_prompt", "decoder_prompt")
_BRANCH = ("prompt_token_ids", "label_token_ids")
_SHOWN_LENGTH = 60


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}... ({type(value)})"


def check_unicode(text: str, name: str) -> None:
    """Check that a text can be encoded as UTF-8; ``name`` is its name in errors.

    Raises:
        RequestError: It cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is no valid Unicode text: {error.reason} at character {error.start}"
        ) from error


def _listed(value: object) -> Sequence[object] | None:
    """Return the value as a sequence; None if it is a string or no sequence."""
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors
        value = value.tolist()
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def _parse_token_lists(prompt_token_ids: object) -> list[ParsedPrompt]:
    listed = _listed(prompt_token_ids)
    if listed is None:
        raise RequestError(
            f"prompt_token_ids is {_shown(prompt_token_ids)}; it must be a list of token ids or "
            "a list of such lists"
        )
    if not listed:
        raise RequestError("no prompts: prompt_token_ids is empty; give at least one prompt")
    if not any(_listed(token_ids) is not None for token_ids in listed):
        return [ParsedPrompt(None, _token_list(listed, "the prompt"))]
    return [
        ParsedPrompt(None, _token_list(token_ids, f"prompt {index}"))
        for index, token_ids in enumerate(listed)
    ]


def _token_list(value: object, name: str) -> Sequence[SupportsIndex]:
    listed = _listed(value)
    if listed is None:
        raise RequestError(f"the token ids of {name} are {_shown(value)}; they must be a list")
    return listed  # type: ignore[return-value]  # _integers checks the elements


def _integers(values: Sequence[object], name: str) -> list[int]:
    # Fast path; True and False are integers in Python but not accepted here.
    if set(map(type, values)) <= {int}:
        return list(values)  # type: ignore[arg-type]
    integers = []
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise RequestError(
                f"token {index} of {name} is {_shown(value)}; token ids must be integers"
            )
        integers.append(value.__index__())
    return integers
