"""The process that prepares and compiles each new grammar before the engine does.

Its owner starts it for the first grammar, and again after a crash.  What a grammar can do to a
process, by infinite recursion, a bug of llguidance or its size, happens there, and no step of the
engine waits for its preparation in Python.

Costs: half a second for the first grammar; later a millisecond each, plus the compilation.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import EngineDeadError, PagedServeError
from pagedserve.sampling.compile_worker import (
    CPU_SECONDS,
    MEMORY_BYTES,
    PREPARATION_SECONDS,
    encode_frame,
    read_frame,
    write_frame,
)
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling.sources import GrammarKey

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Seconds after which a process that does not respond is killed: much more than its CPU limits,
# since it shares the processor.
_WALL_SECONDS: Final = 180.0
_SCRIPT: Final = Path(__file__).with_name("compile_worker.py")
# Where the script finds this package if its owner found it in the working directory.
_ROOT: Final = str(Path(__file__).parents[2])
# Exit codes caused by a grammar; any other is not the grammar's fault.
_REASONS: Final = {
    -signal.SIGXCPU: (
        f"it takes more than {CPU_SECONDS} s of processor time to compile, "
        f"or {PREPARATION_SECONDS} s to prepare"
    ),
    -signal.SIGSEGV: "it is nested too deeply: compiling it needs more stack than there is",
    -signal.SIGABRT: f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory",
}


class _Running:
    """A running process."""

    def __init__(self) -> None:
        path = os.pathsep.join([*filter(None, sys.path), _ROOT])
        try:
            self._process = subprocess.Popen(  # noqa: S603  # a file of this package
                [sys.executable, "-S", "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # panics would print users' texts
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # not interrupted from the terminal
            )
        except OSError as error:
            raise PagedServeError(f"no process for grammars can be started: {error}") from error
        self.owner = os.getpid()
        self.has_vocabulary = False
        self.end = weakref.finalize(self, _end, self._process, self.owner)

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and does not belong to a parent process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, frame: dict[str, Any]) -> dict[str, Any] | int:
        """Return the response to a frame; as ``exchange``."""
        return self.exchange(encode_frame(frame))

    def exchange(self, frame: bytes) -> dict[str, Any] | int:
        """Return the response to an encoded frame, or the return code of the process if it exited.

        Raises:
            PagedServeError: It does not respond; it is killed.
        """
        requests, answers = self._process.stdin, self._process.stdout
        answer = None
        if requests is not None and answers is not None:
            with contextlib.suppress(OSError, ValueError):  # it has exited, or was ended
                write_frame(requests, frame)
                poll = select.poll()
                poll.register(answers, select.POLLIN)
                if not poll.poll(_WALL_SECONDS * 1000):
                    self.end()
                    raise PagedServeError(
                        f"the process for grammars has not answered for {_WALL_SECONDS:.0f} s"
                    )
                answer = read_frame(answers)
        return self._process.wait() if answer is None else answer


class CompileProcess:
    """A process that compiles grammars of one vocabulary; not thread-safe.

    Attributes:
        num_deaths: Processes that a grammar crashed.
    """

    def __init__(self) -> None:
        """Start no process yet."""
        self._running: _Running | None = None
        self._is_ended = False
        # The first frame of every process: describing a vocabulary takes 1 us a token.
        self._vocabulary: bytes | None = None
        self.num_deaths = 0

    def start(self) -> None:
        """Start the process if it does not run, before the vocabulary is known.

        Raises:
            PagedServeError: The process cannot be started.
        """
        self._started()

    def end(self) -> None:
        """End the process permanently; thread-safe."""
        self._is_ended = True
        if (running := self._running) is not None and running.owner == os.getpid():
            running.end()

    def source(self, key: GrammarKey, vocabulary: "LLTokenizer") -> tuple[str, int]:
        """Prepare and compile a grammar; return llguidance's input for it, and its memory in bytes.

        Args:
            key: Grammar.
            vocabulary: Always the same.

        Raises:
            GrammarError: The grammar is invalid, with the position, or crashed the process.
            EngineDeadError: The process was ended permanently.
            PagedServeError: The process cannot be started, does not respond, fails, or was ended
                twice by something other than the grammar, such as an operator or a lack of memory.
        """
        answer = self._answer(key, vocabulary)
        if isinstance(answer, int) and answer not in _REASONS:
            answer = self._answer(key, vocabulary)
        if not isinstance(answer, int):
            return _source(answer)
        if answer not in _REASONS:
            raise PagedServeError(f"the process for grammars was ended twice, with code {answer}")
        self.num_deaths += 1
        raise GrammarError(_REASONS[answer])

    def _answer(self, key: GrammarKey, vocabulary: "LLTokenizer") -> dict[str, Any] | int:
        """Return the response to a grammar, or the return code of the process."""
        running = self._started()
        if not running.has_vocabulary:
            if self._vocabulary is None:
                self._vocabulary = encode_frame(_described(vocabulary))
            answer = running.exchange(self._vocabulary)
            if isinstance(answer, int):
                self._forget(running)
                raise PagedServeError(f"the process for grammars ended at its start: {answer}")
            running.has_vocabulary = True
        answer = running.ask({"grammar": key})
        if isinstance(answer, int):
            self._forget(running)
        elif answer["is_grown"]:
            self._forget(running)
            with contextlib.suppress(PagedServeError):  # the next grammar tries again
                self.start()
        return answer

    def _started(self) -> _Running:
        running = self._running
        if running is None or not running.is_usable:
            if running is not None:
                running.end()
            if self._is_ended:
                raise EngineDeadError("the process for grammars was ended with its engine")
            self._running = running = _Running()
            if self._is_ended:  # by another thread
                running.end()
        return running

    def _forget(self, running: _Running) -> None:
        running.end()
        self._running = None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process that this one started."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # closing flushes the rest
                stream.close()


def _source(answer: dict[str, Any]) -> tuple[str, int]:
    """Return llguidance's input of a response, and the memory in bytes of what it compiles to.

    Raises:
        GrammarError: The grammar is invalid, with the position.
        PagedServeError: Preparing it failed.
    """
    if "error" in answer:
        raise PagedServeError(f"the process for grammars failed: {answer['error']}")
    if "fault" in answer:
        raise GrammarError(answer["fault"], answer["place"])
    return answer["source"], answer["num_bytes"]


def _described(vocabulary: "LLTokenizer") -> dict[str, Any]:
    """Build the first frame."""
    token_ids = range(vocabulary.vocab_size)
    return {
        "tokens": [vocabulary.decode_bytes([token]).decode("latin-1") for token in token_ids],
        "special_token_ids": [token for token in token_ids if vocabulary.is_special_token(token)],
        "eos_token_ids": list(vocabulary.eos_tokens),
    }
