"""Chat templates, rendered within limits of time and memory.

A template is a program from a model's files or from a request.  It is rendered in jinja's sandbox,
by transformers or by `pagedserve.inputs.chat_renderer`.  The sandbox limits neither time nor
memory: two nested loops over ``range(99999)`` or ``'a' * 10**10`` hang or exhaust the process.
Here a rendering fails once it exceeds a number of steps or characters.

Invariants:

1. A template within the limits renders the same as without them.
2. Templates that other code renders in this process have no limits.

Costs: one Python call for each loop, call, filter and output of a template.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

P = ParamSpec("P")
R = TypeVar("R")

MAX_STEPS: Final = 1_000_000
# Limits for the characters of all strings that a rendering creates, and of one string.
MAX_CHARACTERS: Final = 200_000_000
MAX_TEXT_CHARACTERS: Final = 20_000_000
MAX_TEMPLATE_CHARACTERS: Final = 1_000_000

# Limit of integers; larger ones make powers and products arbitrarily slow.
_MAX_BITS: Final = 1024
# Cost of a call, in loop iterations.
_CALL_STEPS: Final = 8
# Elements that a filter processes per step.
_STEP_ELEMENTS: Final = 64
# Filters and methods whose arguments set the width of their result, as a number or a format.
_OF_WIDTH: Final = ("batch", "center", "ljust", "rjust", "slice", "tojson", "truncate", "zfill")
_OF_FORMAT: Final = "format"
_DIGITS: Final = re.compile(r"\d+")
_ITEMS: Final = "_counted_items"
_TEXT: Final = "_counted_text"


@dataclass(slots=True)
class _Budget:
    """Remaining steps and characters of a rendering."""

    num_steps: int
    num_characters: int

    def take(self, num_steps: int, num_characters: int = 0) -> None:
        """Subtract steps and characters.

        Raises:
            TemplateError: The budget is exceeded.
        """
        self.num_steps -= num_steps
        self.num_characters -= num_characters
        if self.num_steps < 0 or self.num_characters < 0:
            raise TemplateError(
                f"it takes more than {MAX_STEPS} steps"
                if self.num_steps < 0
                else f"it makes more than {MAX_CHARACTERS} characters"
            )


_budget: Final = ContextVar[_Budget | None]("_budget", default=None)


def bounded(render: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that renders a template, so that each call stays within the limits."""
    _limit_transformers()

    @functools.wraps(render)
    def rendering(*positional: P.args, **named: P.kwargs) -> R:
        before = _budget.set(_Budget(MAX_STEPS, MAX_CHARACTERS))
        try:
            return render(*positional, **named)
        finally:
            _budget.reset(before)

    return rendering


def _counted(made: Any) -> Any:
    """Charge a created value: one step, and its characters or elements."""
    budget = _budget.get()
    if budget is not None:
        if isinstance(made, str):
            budget.take(1, len(made))
        else:
            budget.take(1 + (len(made) if isinstance(made, list | tuple | dict) else 0))
    return made


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else 0


def _counted_items(value: Any, num_characters: int) -> Any:
    """Charge the elements of a loop before it starts; one at a time if it has no length.

    Args:
        value: Iterable of the loop.
        num_characters: Characters of the template within the loop.
    """
    budget = _budget.get()
    if budget is None:
        return value
    if hasattr(value, "__len__"):
        budget.take(len(value), len(value) * num_characters)
        return value
    return _one_by_one(value, budget, num_characters)


def _one_by_one(values: Iterable[Any], budget: _Budget, num_characters: int) -> Iterator[Any]:
    for value in values:
        budget.take(1, num_characters)
        yield value


def _check_size(name: str, subject: Any, arguments: Iterable[Any], num_steps: int = 1) -> None:
    """Charge a call, and refuse one whose result would be too long.

    Args:
        name: Name of a filter, or of a string method.
        subject: Filtered value, or the string.
        arguments: Further arguments.
        num_steps: Steps of a call besides those for its size.

    Raises:
        TemplateError: The result would be too long.
    """
    budget = _budget.get()
    if budget is None:
        return
    given = list(arguments)
    num_elements = len(subject) if isinstance(subject, Sized) else 0
    budget.take(num_steps + num_elements // _STEP_ELEMENTS)
    widest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    longest = max(map(_length, given), default=0)
    size = 0
    if name == "replace" and len(given) > 1:
        size = str(subject).count(str(given[0])) * _length(given[1])
    elif name == "join" and isinstance(subject, str):  # the method of a separator
        size = max((len(value) for value in given if isinstance(value, list)), default=0)
        size *= len(subject)
    elif name == "join":
        size = num_elements * longest
    elif name in ("indent", "expandtabs"):
        text = str(subject)
        size = (text.count("\n") + text.count("\t") + 1) * max(widest, longest)
    elif name in _OF_WIDTH:
        size = widest
    elif name == _OF_FORMAT:
        size = max(widest, *map(int, _DIGITS.findall(str(subject))), 0)
    _check_length(size, name)


def _check_length(size: int, what: str) -> None:
    if size > MAX_TEXT_CHARACTERS and _budget.get() is not None:
        raise TemplateError(f"{what} would make more than {MAX_TEXT_CHARACTERS} characters")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too long a string or too large a number.

    Raises:
        TemplateError: The result would be too large.
    """
    if operator == "%" and isinstance(left, str):
        _check_size(_OF_FORMAT, left, right if isinstance(right, tuple) else (right,))
    elif operator == "*" and not (isinstance(left, int) and isinstance(right, int)):
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                _check_length(len(many) * times, operator)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
        if max(bits, right.bit_length()) > _MAX_BITS and _budget.get() is not None:
            raise TemplateError(f"{operator} would make a number of more than {_MAX_BITS} bits")


class _Filters(dict[str, Callable[..., Any]]):
    """jinja's filters, each charged for its result."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _counting(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Get a filter, wrapped; see ``dict``."""
        return _counting(name, super().__getitem__(name)) if name in self else default


@functools.cache
def _counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    if name in (_ITEMS, _TEXT):
        return own
    first = int(hasattr(own, "jinja_pass_arg"))  # a context comes before the filtered value

    @functools.wraps(own)
    def filtering(*positional: Any, **named: Any) -> Any:
        _check_size(name, positional[first], [*positional[first + 1 :], *named.values()])
        return _counted(own(*positional, **named))

    return filtering


class _Counting(NodeTransformer):
    """Inserts a filter around the iterables of loops and the results of ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  # jinja's name for it
        """Wrap the iterable of a loop."""
        self.generic_visit(node)
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, _ITEMS, [nodes.Const(written)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """Wrap the result of a concatenation."""
        self.generic_visit(node)
        return _filtered(node, _TEXT, [])


def _filtered(node: Any, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, which enforces the budget of a rendering if it has one."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Create the environment; see jinja's."""
        super().__init__(*positional, **named, finalize=_counted)
        self.filters = _Filters(self.filters | {_ITEMS: _counted_items, _TEXT: _counted})
        self.globals.pop("lipsum", None)  # creates strings of any length; no prompt uses it

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE_CHARACTERS and _budget.get() is not None:
            raise TemplateError(
                f"it has {len(source)} characters; accepted are {MAX_TEMPLATE_CHARACTERS}"
            )
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, within the budget; called for operators with large results."""
        if operator == "+":
            return _counted(left + right)
        _check_operands(operator, left, right)
        return _counted(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *positional: Any, **named: Any) -> Any:
        """Call a macro, function or method, within the budget."""
        method = getattr(called, "__wrapped__", called)  # jinja wraps string format methods
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "") if isinstance(subject, str) else ""
        _check_size(name.removesuffix("_map"), subject, [*positional, *named.values()], _CALL_STEPS)
        return _counted(super().call(context, called, *positional, **named))


def _limit_transformers() -> None:
    """Give the renderer of transformers, if imported, the environment of templates it compiles."""
    renderer: Any = sys.modules.get("transformers.utils.chat_template_utils")
    if renderer is not None:
        renderer.ImmutableSandboxedEnvironment = BoundedEnvironment
