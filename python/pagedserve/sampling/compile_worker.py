"""A process that compiles grammars first and may crash; the engine compiles those it survived.

It reads frames from its standard input and writes a response for each to its standard output; a
frame is a length, 4 bytes in little-endian order, and that many bytes of JSON.  The first has the
vocabulary, each further one a grammar.  It exits at the end of its input.

Invariants:

1. It imports only llguidance and the standard library, so that it starts in a tenth of a second.
2. Its thread has half the stack of any thread in which the engine uses grammars: recursion that
   overflows there overflows here too.
3. The operating system limits processor time and memory of a grammar, not a clock: a busy machine
   refuses nothing that an idle one accepts.
"""

import ctypes
import json
import resource
import struct
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

# Bytes; threads of glibc and Rust have at least 2 MiB.
STACK_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<I")


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read the next frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    frame: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(head)[0]))
    return frame


def write_frame(stream: IO[bytes], frame: dict[str, Any]) -> None:
    """Write a frame and flush the stream."""
    data = json.dumps(frame).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def limit_cpu(seconds: int) -> None:
    """Terminate this process with SIGXCPU after this many further seconds of CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def limit_memory(num_bytes: int) -> None:
    """Limit this process to this many bytes beyond its current memory."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    taken = num_pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, hard))


class Tokens:
    """A vocabulary in llguidance's interface for tokenizers without a file."""

    bos_token_id = None

    def __init__(self, start: dict[str, Any]) -> None:
        """Read the first frame."""
        self.eos_token_id = start["eos_token_ids"][0] if start["eos_token_ids"] else 0
        self.tokens = [token.encode("latin-1") for token in start["tokens"]]
        self.special_token_ids = start["special_token_ids"]
        self.vocabulary: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text, though not as its tokenizer would."""
        if self.vocabulary is None:
            return []
        return list(self.vocabulary.greedy_tokenize(text.decode(errors="replace")))


def fault_of(
    source: str, vocabulary: "LLTokenizer", limits: "LLParserLimits", num_steps: int
) -> str:
    """Compile a grammar; return the error, empty if a text can start."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if matcher.is_error():
        return LLMatcher.validate_grammar(source, vocabulary, limits=limits) or matcher.get_error()
    for _ in range(num_steps):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return matcher.get_error()
        if matcher.is_stopped() or not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return ""


def serve() -> None:
    """Respond to frames until the input ends."""
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    start = read_frame(requests)
    if start is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = Tokens(start)
    vocabulary = tokens.vocabulary = LLTokenizer(
        TokenizerWrapper(tokens),
        n_vocab=len(tokens.tokens),
        eos_token=start["eos_token_ids"] or None,
    )
    limits = LLParserLimits(**start["limits"])
    limit_memory(start["memory_bytes"])
    write_frame(answers, {"fault": ""})
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while (frame := read_frame(requests)) is not None:
        limit_cpu(start["cpu_seconds"])
        begin = time.process_time()
        try:
            fault = fault_of(frame["source"], vocabulary, limits, start["num_steps"])
        # A Rust panic is not an Exception.
        except BaseException as error:  # noqa: BLE001
            fault = f"it cannot be compiled: {error}"
        write_frame(answers, {"fault": fault, "seconds": time.process_time() - begin})
        if trim is not None:  # memory that one grammar needed is not taken from the next
            trim(0)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
