"""A process that prepares and compiles grammars; the engine compiles those that did not end it.

It reads frames from its standard input and writes a response for each to its standard output; a
frame is a length, 4 bytes in little-endian order, and that many bytes of JSON.  The first has the
vocabulary, each further one a grammar.  Each response says whether the process has grown, and
should be replaced.  It exits at the end of its input.

Invariants:

1. It imports llguidance, the standard library and modules of this package that need no more: not
   numpy, torch, transformers or tokenizers, so that it starts in a fifth of a second.
2. Its thread has half the stack of any thread in which the engine uses grammars: recursion that
   overflows there overflows here too.
3. The operating system limits processor time and memory of a grammar, not a clock: a busy machine
   refuses nothing that an idle one accepts.
4. A lack of memory ends it, in Python as in Rust.
5. The steps of the engine come before it on a busy processor.
"""

import json
import os
import resource
import struct
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from pagedserve.host_ops.heap import allocated_bytes, return_freed_memory
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling.sources import (
    PARSER_LIMITS,
    GrammarKey,
    Trials,
    compiled_source,
    without_forcing,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Processor time per compilation, and for the preparation before and after each, in seconds; the
# operating system counts whole seconds.
CPU_SECONDS: Final = 2
PREPARATION_SECONDS: Final = 10
# Memory per grammar, besides the vocabulary.
MEMORY_BYTES: Final = 1 << 30
# Memory that it may keep after a grammar; llguidance and Python return little to the system.
MAX_KEPT_BYTES: Final = 16 << 20
# It keeps a quarter of a core beside the threads of the engine.
_NICENESS: Final = 5
# Maximum tokens of a text that is tested.
_NUM_STEPS: Final = 3
# Text that must follow and is found with the mask before it: 6 ms.
_MAX_FORCED_BYTES: Final = 4096
# Assertions of llguidance that a grammar can fail, and what they mean.
_ASSERTIONS: Final = {"grammar.symbols.len()": "it has more than 65,525 symbols"}
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


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Encode a frame, its length first."""
    data = json.dumps(frame).encode()
    return _LENGTH.pack(len(data)) + data


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write an encoded frame and flush the stream."""
    stream.write(frame)
    stream.flush()


def limit_cpu(seconds: int) -> None:
    """Terminate this process with SIGXCPU after this many further seconds of CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


def memory_in_use() -> tuple[int, int]:
    """Bytes of the address space of this process, and of its resident memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    taken, resident = (int(count) * resource.getpagesize() for count in pages[:2])
    return taken, resident


def limit_memory(num_bytes: int) -> None:
    """Limit this process to this many bytes beyond its current memory."""
    taken, _ = memory_in_use()
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


def read_vocabulary(start: dict[str, Any]) -> "LLTokenizer":
    """Build the vocabulary of the first frame."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = Tokens(start)
    tokens.vocabulary = LLTokenizer(
        TokenizerWrapper(tokens),
        n_vocab=len(tokens.tokens),
        eos_token=start["eos_token_ids"] or None,
    )
    return tokens.vocabulary


class Compilation:
    """Compilations with one vocabulary.

    Attributes:
        vocabulary: The vocabulary.
        num_bytes: Memory of the last grammar that was compiled, once a text has started.
        forces_long_text: Whether a long text had to follow at its start.
    """

    def __init__(self, vocabulary: "LLTokenizer") -> None:
        """Compile nothing yet."""
        self.vocabulary = vocabulary
        self.num_bytes = 0
        self.forces_long_text = False

    def fault_of(self, source: str) -> str:
        """Compile llguidance's input; return the error, empty if a text can start."""
        error, _, backtrace = self._error_of(source).partition("\n<backtrace>")
        if not backtrace:
            return error
        return next((text for code, text in _ASSERTIONS.items() if code in error), error)

    def _error_of(self, source: str) -> str:
        from llguidance import LLMatcher, LLParserLimits

        limits, before = LLParserLimits(**PARSER_LIMITS), allocated_bytes()
        matcher = LLMatcher(self.vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            error = LLMatcher.validate_grammar(source, self.vocabulary, limits=limits)
            return error or matcher.get_error()
        self.forces_long_text = False
        for _ in range(_NUM_STEPS):
            self.forces_long_text |= len(matcher.compute_ff_bytes()) > _MAX_FORCED_BYTES
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                return matcher.get_error()
            if matcher.is_stopped() or not mask:
                break
            matcher.consume_token((mask & -mask).bit_length() - 1)
        self.num_bytes = max(0, allocated_bytes() - before)
        return ""

    def limited_fault_of(self, source: str) -> str:
        """Compile llguidance's input within the processor time of a compilation."""
        limit_cpu(CPU_SECONDS)
        try:
            return self.fault_of(source)
        except MemoryError:
            raise
        # A Rust panic is not an Exception.
        except BaseException as error:  # noqa: BLE001
            return f"it cannot be compiled: {error}"
        finally:
            limit_cpu(PREPARATION_SECONDS)


def answer_to(key: GrammarKey, vocabulary: "LLTokenizer") -> dict[str, Any]:
    """Prepare and compile a grammar.

    Returns:
        ``source``, llguidance's input for it, and ``num_bytes``, its memory once compiled; or
        ``fault`` and ``place``, why it is invalid and where; or ``error``, what went wrong here.
    """
    limit_cpu(PREPARATION_SECONDS)
    try:
        compilation = Compilation(vocabulary)
        source = compiled_source(key, Trials(compilation.limited_fault_of))
        if compilation.forces_long_text:
            unforced = without_forcing(source)
            source = source if compilation.limited_fault_of(unforced) else unforced
    except GrammarError as fault:
        return {"fault": str(fault), "place": fault.place}
    except RecursionError:
        return {"fault": "it is nested too deeply", "place": ""}
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}
    return {"source": source, "num_bytes": compilation.num_bytes}


def serve() -> None:
    """Respond to frames until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    start = read_frame(requests)
    if start is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    vocabulary = read_vocabulary(start)
    del start
    limit_memory(MEMORY_BYTES)
    answer_to(GrammarKey("json", "{}", False, False), vocabulary)  # allocates what all need
    return_freed_memory()
    _, at_start = memory_in_use()
    write_frame(answers, encode_frame({}))
    while (frame := read_frame(requests)) is not None:
        answer = answer_to(GrammarKey(*frame["grammar"]), vocabulary)
        return_freed_memory()  # or what one grammar needed would be taken from the next
        _, resident = memory_in_use()
        answer["is_grown"] = resident > at_start + MAX_KEPT_BYTES
        write_frame(answers, encode_frame(answer))


def serve_or_abort() -> None:
    """Respond to frames; abort if the memory is used up."""
    try:
        serve()
    except MemoryError:
        os.abort()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve_or_abort)
    thread.start()
    thread.join()
