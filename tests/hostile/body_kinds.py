"""Bodies: lists without end, wrong types, bytes that are no JSON, images, adapters, odd routes."""

import base64
import json
import struct
import zlib
from functools import cache
from random import Random
from typing import Any, Final

from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.messages.protocol import CountTokensBody, MessagesBody
from pagedserve.server.ollama.protocol import GenerateBody, OllamaChatBody
from pagedserve.server.pooling.protocol import EmbeddingBody, RerankBody, ScoreBody
from pagedserve.server.protocol import ABSENT
from pagedserve.server.responses.protocol import ResponsesBody
from pagedserve.server.tokens.protocol import DetokenizeBody, TokenizeBody
from tests.hostile.client import Target, chat, completion, request
from tests.hostile.grammar_kinds import Sent
from tests.hostile.junk import number, size, text, value
from tests.hostile.model import EXPLODING

_MODELS: Final[dict[str, Any]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/score": ScoreBody,
}
_METHODS: Final = (
    "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "BREW", "CONNECT",
)  # fmt: skip
_ROUTES: Final = (
    "/", "/health", "/metrics", "/v1/models", "/v1/models/../../etc/passwd", "/v1/models/%00",
    "/v1/models/" + "a" * 5000, "//", "/v1//completions", "/v1/completions/", "/openapi.json",
    "/v1/responses", "/v1/audio/speech", "/load", "/ping", "/server_info", "/%ff%fe", "/docs",
    "/v1/completions?stream=true", "http://other.invalid/v1/models", "*", "/v1/audio/translations",
)  # fmt: skip
_NAMES: Final = ("../../x", "a\nb", "a\x00", "", " ", "x" * 10_000, "\u202e", "base", "good", "é")


def long_lists(rng: Random) -> Sent:
    """A list of up to hundreds of thousands of elements where a few are meant."""
    length = size(rng, 300_000)
    field, element = rng.choice(
        (
            ("prompt", {}),
            ("prompt", 1),
            ("prompt", "a"),
            ("prompt", [1]),
            ("allowed_token_ids", 1),
            ("stop_token_ids", 5),
            ("stop_token_ids", "x"),
            ("bad_words", "b"),
            ("stop", "st"),
        )
    )
    return completion(**{field: [element] * length})


def long_messages(rng: Random) -> Sent:
    """Messages, or parts of one, without end; tools too."""
    length = size(rng, 200_000)
    part = {"type": "text", "text": "a"}
    return rng.choice(
        (
            lambda: chat(messages=[{"role": "user", "content": "a"}] * length),
            lambda: chat(messages=[{}] * length),
            lambda: chat(messages=[{"role": "user", "content": [part] * length}]),
            lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}] * length),
            lambda: ("/detokenize", {"tokens": [1] * length}),
            lambda: ("/v1/rerank", {"query": "a", "documents": ["b"] * length}),
        )
    )()


def long_texts(rng: Random) -> Sent:
    """A text of up to megabytes where a word is meant."""
    long = rng.choice(("a", "ab ", "é", "\n", "<|end|>")) * size(rng, 2_000_000)
    return rng.choice(
        (
            lambda: completion(prompt=long),
            lambda: completion(stop=long),
            lambda: completion(bad_words=[long]),
            lambda: completion(cache_salt=long),
            lambda: completion(model=long),
            lambda: completion(user=long),
            lambda: completion(**{long: 1}),
            lambda: chat(messages=[{"role": long, "content": "a"}]),
            lambda: chat(messages=[{"role": "user", "content": long}]),
            lambda: chat(chat_template=long),
            lambda: ("/tokenize", {"prompt": long}),
        )
    )()


def long_objects(rng: Random) -> Sent:
    """An object of very many names."""
    names = {str(index): 0.0 for index in range(size(rng, 200_000))}
    field = rng.choice(
        ("logit_bias", "metadata", "structured_outputs", "stream_options", "vllm_xargs")
    )
    return completion(**{field: names})


def wrong_types(rng: Random) -> Sent:
    """Any value in any field of any route."""
    path = rng.choice([*_MODELS])
    names = [*_MODELS[path].model_fields, *ABSENT]
    body: dict[str, Any] = dict({"prompt": "a"} if "prompt" in _MODELS[path].model_fields else {})
    body |= {name: value(rng) for name in rng.sample(names, rng.randrange(1, 5))}
    if "messages" in _MODELS[path].model_fields and path != "/tokenize":
        body.setdefault("messages", [{"role": "user", "content": value(rng)}])
    if path.startswith("/v1/responses"):
        body.setdefault("input", value(rng))
        body.setdefault("max_output_tokens", 4)
    elif path.startswith("/api/"):
        body.setdefault("options", {"num_predict": 4})
    else:
        body.setdefault("max_tokens", 4)
    return path, body


def extremes(rng: Random) -> Sent:
    """Numbers at and beyond the ends of what parameters take."""
    fields = (
        "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed",
        "frequency_penalty", "repetition_penalty", "min_tokens", "prompt_logprobs", "logprobs",
        "length_penalty", "priority", "timeout", "stream_interval", "truncate_prompt_tokens",
    )  # fmt: skip
    body = {name: number(rng) for name in rng.sample(fields, rng.randrange(1, 4))}
    body["prompt"] = rng.choice(("a", [number(rng)], [[number(rng)], [1, 2]], [True], []))
    body["logit_bias"] = {str(number(rng)): number(rng)}
    return completion(**body)


def no_json(rng: Random) -> Sent:
    """Bytes that are nearly JSON, or none."""
    good = b'{"prompt": "a", "max_tokens": 4, "temperature": '
    bodies = (
        lambda: (
            good + rng.choice((b"NaN", b"-Infinity", b"1e999", b"1" * 5000, b"0x10", b"01")) + b"}"
        ),
        lambda: b"[" * size(rng, 200_000),
        lambda: b'{"a":' * size(rng, 100_000),
        lambda: good + b"[" * size(rng, 100_000),
        lambda: b'{"prompt": "\xff\xfe\xc3\x28", "max_tokens": 4}',
        lambda: b'\xef\xbb\xbf{"prompt": "a"}',
        lambda: '{"prompt": "a", "max_tokens": 4}'.encode("utf-16"),
        lambda: b'{"prompt": "a", "prompt": 5, "prompt": "b", "max_tokens": 4}',
        lambda: b'{"prompt": "\\ud800\\u0000", "max_tokens": 4}',
        lambda: b'{"prompt": "a"} {"prompt": "b"}',
        lambda: rng.randbytes(size(rng, 5000)),
        lambda: b"",
        lambda: b"null",
        lambda: zlib.compress(b'{"prompt": "a"}'),
    )
    return rng.choice((*_MODELS,)), rng.choice(bodies)()


@cache
def _bomb(width: int, height: int) -> str:
    """A PNG of one colour: kilobytes that decode to very many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\x00" * ((width + 7) // 8 + 1) * height, 9)
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return base64.b64encode(raw).decode()


def images(rng: Random) -> Sent:
    """Images that are none, are elsewhere, or are very many pixels."""
    urls = (
        lambda: f"data:image/png;base64,{_bomb(5800, 5800)}",
        lambda: f"data:image/png;base64,{_bomb(8, 8)[: rng.randrange(90)]}",
        lambda: "data:image/png;base64," + "A" * size(rng, 1_000_000),
        lambda: f"data:{text(rng)},{text(rng)}",
        lambda: "http://127.0.0.1:1/x.png",
        lambda: "file:///etc/passwd",
        lambda: value(rng),
    )
    parts = [
        {"type": "image_url", "image_url": rng.choice(({"url": rng.choice(urls)()}, value(rng)))}
        for _ in range(size(rng, 16))
    ]
    return chat(messages=[{"role": "user", "content": parts}])


def forms(rng: Random) -> bytes:
    """Forms with files for a model that hears nothing, and forms that are none."""
    path = rng.choice(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/completions"))
    parts = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{rng.choice(("file", "model", text(rng)))}"'
        f"{rng.choice(('', '; filename=' + chr(34) + 'a' + chr(34)))}\r\n\r\n{text(rng)}\r\n"
        for _ in range(size(rng, 2000))
    )
    body = (parts + rng.choice(("--b--\r\n", "--b", ""))).encode("utf-8", "replace")
    kinds = ("multipart/form-data; boundary=b", "multipart/form-data", "application/json", "")
    return request(path, body, headers={"Content-Type": rng.choice(kinds)})


def routes(rng: Random) -> bytes:
    """Methods and paths that are not there, with headers that mean something elsewhere."""
    headers = rng.choice(
        (
            {},
            {"X-HTTP-Method-Override": "DELETE"},
            {"Authorization": "Bearer " + "k" * size(rng, 20_000)},
            {"X-Request-Id": "é" * size(rng, 1000)},
            {"Range": "bytes=0-1,5-6,-1"},
            {"Content-Encoding": "gzip"},
            {"Cookie": "a=b; " * size(rng, 2000)},
            {"Host": "a b\tc"},
        )
    )
    body: object = rng.choice((b"", value(rng)))
    path, method = rng.choice(_ROUTES), rng.choice(_METHODS)
    return request(path, body, method=method, headers=headers)


def chatter(rng: Random) -> Sent:
    """Requests that are right, of all kinds, so that there is always something to disturb."""
    fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "seed": rng.randrange(100)}
    fields |= rng.choice(({}, {"n": 2}, {"stream": True}, {"logprobs": 3}, {"temperature": 0}))
    fields |= rng.choice(({}, {}, {"guided_regex": "[a-z]{2,9}"}, {"stop": ["a"]}, {"echo": True}))
    return completion(prompt="abc" * rng.randrange(1, 60), **fields)


async def adapters(target: Target, rng: Random) -> str:
    """Load an adapter of any name from anywhere, use it, and take it away again."""
    files = [str(path) for path in sorted(target.adapters.iterdir()) if path.name != EXPLODING]
    odd = ("a\x00b", "x" * 5000, "/etc", "/proc/self/mem", ".", "", str(target.adapters / "none"))
    name = rng.choice((*_NAMES, text(rng)))
    path = rng.choice((*files, *files, *odd))
    given = {"lora_name": rng.choice((name, name, value(rng))), "lora_path": path}
    status = await target.ask(request("/v1/load_lora_adapter", given))
    if status == "200":
        await target.ask(request("/v1/completions", completion(model=given["lora_name"])[1]))
    unload = {"lora_name": given["lora_name"], "lora_int_id": rng.choice((None, None, number(rng)))}
    await target.ask(request("/v1/unload_lora_adapter", unload))
    if status == "200":  # another's number may have kept it
        await target.ask(request("/v1/unload_lora_adapter", unload | {"lora_int_id": None}))
    return status


async def exploding_patterns(target: Target, rng: Random) -> str:
    """Load an adapter whose pattern of ranks takes a regular expression years."""
    given = {"lora_name": f"p{rng.random()}", "lora_path": str(target.adapters / EXPLODING)}
    return await target.ask(request("/v1/load_lora_adapter", given))


def aborts(rng: Random) -> Sent:
    """Ends of requests of others, by names that nobody has."""
    ids = rng.choice((["x"] * size(rng, 100_000), [text(rng)], value(rng)))
    return rng.choice((("/abort_requests", {"request_ids": ids}), ("/reset_prefix_cache", {})))


def cut_json(rng: Random) -> bytes:
    """A body that ends in the middle and says so, as a whole one of that length."""
    whole = json.dumps(completion(stop=["a"] * 50)[1]).encode()
    return request("/v1/completions", whole[: rng.randrange(len(whole))])
