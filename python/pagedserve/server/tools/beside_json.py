"""Grammar of a response that is JSON, or tool calls in the format of the model's family.

The JSON is held to its schema.  Calls are left to the model, as without a grammar: once a start tag
begins them, any text and any token may follow.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pagedserve.server.tools.formats import ToolFormat
from pagedserve.server.tools.schemas import schema_of_call

# A call without a tag that begins as the JSON does.
_OBJECT_START: Final = "{"
_ANY_ARGUMENTS: Final = {"type": "object", "additionalProperties": True}
_REST: Final = """rest: (TEXT | <[*]>)*
TEXT: /(?s:.+)/
"""


def is_told_from_calls(answer: Mapping[str, Any] | bool, known: ToolFormat) -> bool:
    """Whether the start of a response shows if it is JSON of a schema, or calls of a format."""
    is_object = isinstance(answer, Mapping) and answer.get("type") == "object"
    return is_object or not known.bare_starts


def grammar_beside_json(
    answer: Mapping[str, Any] | bool,
    known: ToolFormat,
    names: Iterable[str],
    token_ids: Collection[Sequence[int]] = (),
) -> str:
    """Lark grammar of JSON, or of calls and what follows them.

    Args:
        answer: Schema of the JSON; see `is_told_from_calls`.
        known: Tool call format.
        names: Names of the tools, at least one.
        token_ids: Token ids of the start tags that consist of added tokens, which no text matches.
    """
    texts: list[Any] = [answer]
    if _OBJECT_START in known.bare_starts:
        texts.append(schema_of_call(dict.fromkeys(names, _ANY_ARGUMENTS), key="parameters"))
    starts = {*known.starts, *known.bare_starts} - {_OBJECT_START}
    opened = [json.dumps(start, ensure_ascii=False) for start in sorted(starts)]
    opened += [" ".join(f"<[{token_id}]>" for token_id in ids) for ids in token_ids]
    held = " | ".join(f"%json {json.dumps(text)}" for text in texts)
    return f"start: {held} | ({' | '.join(opened)}) rest\n{_REST}"
