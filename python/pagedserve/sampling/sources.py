"""llguidance's input for a grammar: prepared from a request's text, and compiled to check it.

The process for grammars runs this, so that neither a crash nor the time of Python code, up to
seconds for a hostile text, reaches the engine.

Costs: a millisecond and one compilation for most grammars; a schema with ``patternProperties``, or
with an error that is searched or left out, needs one more for each of its parts, up to a limit.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pagedserve.sampling.lark import prepare_lark
from pagedserve.sampling.regexes import ascii_classes
from pagedserve.sampling.schemas import (
    NO_SPACE,
    GrammarError,
    Schema,
    TrialsSpentError,
    leave_out_faults,
    leave_out_patterns,
    placed,
    prepare_schema,
    spread_used_patterns,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from pagedserve.sampling_params.structured_outputs import GrammarKind

# Limits of llguidance's parser; others have its defaults.
PARSER_LIMITS: Final[dict[str, Any]] = {"verbose_errors": False}
_OPTIONS: Final = "%llguidance"
_NO_FORCING: Final = '{"no_forcing": true}'
# Limits for all compilations of one grammar and its parts: their number, and seconds of CPU time,
# with what prepares them.
MAX_TRIALS: Final = 2000
MAX_TRIAL_SECONDS: Final = 10


class GrammarKey(NamedTuple):
    """What a grammar is compiled from; equal keys have equal grammars.

    Attributes:
        kind: Kind of ``definition``.
        definition: JSON schema, regular expression, or Lark or EBNF grammar.
        disable_any_whitespace: Whether JSON has no whitespace between its tokens.
        disable_additional_properties: Whether objects have only the properties that they name.
    """

    kind: "GrammarKind"
    definition: str
    disable_any_whitespace: bool
    disable_additional_properties: bool


class Trials:
    """Compilations of a grammar and its parts, of which it may have a limited number."""

    def __init__(self, fault_of: Callable[[str], str]) -> None:
        """Start to count.

        Args:
            fault_of: Compiles llguidance's input; returns the error, empty if a text can start.
        """
        self._fault_of = fault_of
        self._num_trials = 0
        self._begin = time.process_time()

    def fault(self, source: str) -> str:
        """Compile llguidance's input; return the error for users, empty if a text can start."""
        self._num_trials += 1
        fault = self._fault_of(source)
        if "NoExtension" in fault:
            return "no output can match it"
        return fault.replace("<non-verbose/>", "")

    def part_fault(self, part: Schema) -> str:
        """Compile a part of a schema; return the error, empty if a document can start.

        Raises:
            TrialsSpentError: The grammar has used all its compilations.
        """
        seconds = time.process_time() - self._begin
        if self._num_trials >= MAX_TRIALS or seconds >= MAX_TRIAL_SECONDS:
            raise TrialsSpentError(
                f"checking its patterns takes more than {MAX_TRIALS} compilations or "
                f"{MAX_TRIAL_SECONDS} s of processor time; it must have fewer"
            )
        return self.fault(_schema_source(part))


def compiled_source(key: GrammarKey, trials: Trials) -> str:
    """Return llguidance's input for a grammar, which was compiled without an error.

    Raises:
        GrammarError: The grammar is invalid, with the position in a schema.
    """
    from llguidance import LLMatcher

    if key.kind == "json":
        return _compiled_schema(key, trials)
    if key.kind == "lark":
        return _compiled_lark(key, trials)
    source = str(LLMatcher.grammar_from_regex(ascii_classes(key.definition)))
    if fault := trials.fault(source):
        raise GrammarError(fault)
    return source


def without_forcing(source: str) -> str:
    """Input of llguidance for the same texts, of which none is followed ahead of its tokens.

    The first mask before a text that must follow takes as long as the text: 0.15 s for 100,000
    characters, in which no other sequence gets a token.
    """
    if not source.startswith("{"):
        return _unforced(source)
    content = json.loads(source)
    for grammar in content["grammars"]:
        schema, text = grammar.pop("json_schema", None), grammar.get("lark_grammar")
        grammar["lark_grammar"] = _unforced(text or f"start: %json {json.dumps(schema)}\n")
    return json.dumps(content)


def _unforced(lark: str) -> str:
    """A grammar with the option, unless it has options already."""
    return lark if _OPTIONS in lark else f"{_OPTIONS} {_NO_FORCING}\n{lark}"


def _compiled_lark(key: GrammarKey, trials: Trials) -> str:
    from llguidance import LLMatcher

    fault = ""
    for convert in (_part_of_lark, _usable_part_of_lark):
        grammar = prepare_lark(key.definition, partial(convert, key, trials))
        source = str(LLMatcher.grammar_from_lark(grammar))
        if not (fault := trials.fault(source)):
            return source
    raise GrammarError(fault)


def _usable_part_of_lark(key: GrammarKey, trials: Trials, schema: Any) -> Any:
    schema = _part_of_lark(key, trials, schema)
    if _is_lenient(schema):
        leave_out_faults(schema, trials.part_fault)
    return schema


def _part_of_lark(key: GrammarKey, trials: Trials, schema: Any) -> Any:
    """Convert a schema in a Lark grammar; its own ``x-guidance`` goes before the key's options."""
    schema = _prepared_schema(key, trials, schema)
    if key.disable_any_whitespace and isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        schema["x-guidance"] = NO_SPACE | options if isinstance(options, dict) else options
    return schema


def _prepared_schema(key: GrammarKey, trials: Trials, schema: Any) -> Any:
    schema = prepare_schema(schema, is_closed=key.disable_additional_properties)
    if _is_lenient(schema):
        leave_out_patterns(schema, trials.part_fault)
    spread_used_patterns(schema, trials.part_fault)
    return schema


def _is_lenient(schema: Any) -> bool:
    """Whether a schema has the option of llguidance that leaves out what it cannot enforce."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def _compiled_schema(key: GrammarKey, trials: Trials) -> str:
    schema = _prepared_schema(key, trials, json.loads(key.definition))
    source = _schema_source(schema, {"whitespace_flexible": not key.disable_any_whitespace})
    if fault := trials.fault(source):
        raise placed(schema, fault, len(source), trials.part_fault)
    return source


def _schema_source(schema: Any, options: "JsonCompileOptions | None" = None) -> str:
    """Convert a schema to llguidance's input.

    Raises:
        GrammarError: llguidance cannot parse its JSON.
    """
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options))
    except ValueError as error:
        raise GrammarError(str(error)) from error
