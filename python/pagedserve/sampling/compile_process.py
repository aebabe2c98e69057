"""The process that compiles new grammars first, so that a crash does not end the engine.

Its owner starts it for the first grammar, and again after a crash.  What a grammar can do to a
process, by infinite recursion, a bug of llguidance or its size, happens there.

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
from pagedserve.sampling.compile_worker import read_frame, write_frame

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Processor time per grammar in seconds; the operating system counts whole seconds.
CPU_SECONDS: Final = 2
# Memory per grammar, besides the vocabulary.
MEMORY_BYTES: Final = 1 << 30
# Maximum tokens of a text that is tested.
NUM_STEPS: Final = 3
# Limits for all compilations of one grammar and its parts: their number, and seconds of CPU time.
MAX_TRIALS: Final = 2000
MAX_TRIAL_SECONDS: Final = 10
# Seconds after which a process that does not respond is killed: much more than its CPU limit,
# since it shares the processor.
_WALL_SECONDS: Final = 120.0
_SCRIPT: Final = Path(__file__).with_name("compile_worker.py")
# Exit codes caused by a grammar; any other is not the grammar's fault.
_REASONS: Final = {
    -signal.SIGXCPU: f"it takes more than {CPU_SECONDS} s of processor time to compile",
    -signal.SIGSEGV: "it is nested too deeply: compiling it needs more stack than there is",
    -signal.SIGABRT: f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory",
}


class _Running:
    """A running process."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
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
        """Return the response to a frame, or the return code of the process if it exited.

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
        num_trials: Compilations since `begin_grammar`.
        trial_seconds: CPU time of these compilations, seconds.
    """

    def __init__(self, limits: dict[str, Any]) -> None:
        """Set the limits of llguidance's parser, by name; starts no process."""
        self._limits = limits
        self._running: _Running | None = None
        self._is_ended = False
        self.num_deaths = 0
        self.begin_grammar()

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

    def begin_grammar(self) -> None:
        """Reset the counters for another grammar."""
        self.num_trials = 0
        self.trial_seconds = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the grammar has used all compilations that it may have."""
        return self.num_trials >= MAX_TRIALS or self.trial_seconds >= MAX_TRIAL_SECONDS

    def fault(self, source: str, vocabulary: "LLTokenizer") -> str:
        """Compile a grammar; return the error, empty if a text can start.

        Args:
            source: Grammar in llguidance's format.
            vocabulary: Always the same.

        Raises:
            EngineDeadError: It was ended permanently.
            PagedServeError: The process cannot be started, does not respond, or was ended twice by
                something other than the grammar, such as an operator or a lack of memory.
        """
        self.num_trials += 1
        answer = self._answer(source, vocabulary)
        if isinstance(answer, int) and answer not in _REASONS:
            answer = self._answer(source, vocabulary)
        if not isinstance(answer, int):
            self.trial_seconds += answer["seconds"]
            return _worded(answer["fault"])
        if answer not in _REASONS:
            raise PagedServeError(f"the process for grammars was ended twice, with code {answer}")
        self.num_deaths += 1
        return _REASONS[answer]

    def _answer(self, source: str, vocabulary: "LLTokenizer") -> dict[str, Any] | int:
        """Return the response to a grammar, or the return code of the process."""
        running = self._started()
        if not running.has_vocabulary:
            answer = running.ask(_described(vocabulary, self._limits))
            if isinstance(answer, int):
                self._forget(running)
                raise PagedServeError(f"the process for grammars ended at its start: {answer}")
            running.has_vocabulary = True
        answer = running.ask({"source": source})
        if isinstance(answer, int):
            self._forget(running)
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


def _worded(fault: str) -> str:
    """Format an error of llguidance for users."""
    if "NoExtension" in fault:
        return "no output can match it"
    return fault.replace("<non-verbose/>", "")


def _described(vocabulary: "LLTokenizer", limits: dict[str, Any]) -> dict[str, Any]:
    """Build the first frame."""
    token_ids = range(vocabulary.vocab_size)
    return {
        "tokens": [vocabulary.decode_bytes([token]).decode("latin-1") for token in token_ids],
        "special_token_ids": [token for token in token_ids if vocabulary.is_special_token(token)],
        "eos_token_ids": list(vocabulary.eos_tokens),
        "limits": limits,
        "memory_bytes": MEMORY_BYTES,
        "cpu_seconds": CPU_SECONDS,
        "num_steps": NUM_STEPS,
    }
