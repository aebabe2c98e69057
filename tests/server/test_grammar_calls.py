"""A list of calls is read alike however it comes, and what is cut is given as far as it came."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.server.tools.grammar_calls import FORCED_HEAD, GrammarCalls
from pagedserve.server.tools.readers import Call, Parts

JSON = st.recursive(
    st.text('"\\{}[],:a\n', max_size=8) | st.integers() | st.none(),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text('"\\{}a'), parts, max_size=3)
    ),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text('"\\{}a]', min_size=1), st.dictionaries(st.text('"}a'), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


def read(pieces: list[str]) -> Parts:
    calls, whole = GrammarCalls(FORCED_HEAD), Parts()
    for place, piece in enumerate(pieces):
        parts = calls.feed(piece, is_last=place == len(pieces) - 1)
        if parts.more_arguments:
            name, arguments, _ = whole.calls[-1]
            whole.calls[-1] = Call(name, arguments + parts.more_arguments)
        whole.calls += parts.calls
        whole.is_cut = parts.is_cut
        assert parts.content == parts.reasoning == ""
    return whole


@given(
    wanted=CALLS,
    separators=st.sampled_from([(",", ":"), (", ", ": "), ("\n, ", " :\n")]),
    data=st.data(),
)
def test_calls_are_read_in_every_split_and_up_to_every_cut(
    wanted: list[tuple[str, dict[str, object]]], separators: tuple[str, str], data: st.DataObject
) -> None:
    texts = [(name, json.dumps(given, separators=separators)) for name, given in wanted]
    listed = [{"name": name, "parameters": given} for name, given in wanted]
    whole = json.dumps(listed, separators=separators)
    calls = [Call(*text) for text in texts]
    assert read([whole]) == read([*whole, ""]) == Parts(calls=calls)
    cut = data.draw(st.integers(0, len(whole)))
    place = data.draw(st.integers(0, cut))
    found = read([whole[:place], whole[place:cut]])
    assert found == read([*whole[:cut], ""])
    num_whole = len(found.calls) - found.is_cut
    assert found.calls[:num_whole] == calls[:num_whole]
    if found.is_cut:
        name, arguments, _ = found.calls[-1]
        assert name == calls[num_whole].name
        assert calls[num_whole].arguments.startswith(arguments)


@pytest.mark.parametrize("text", ["", "[", '[{"name":"a', '[{"name":"a","parameters":'])
def test_what_names_no_call_yet_is_nothing(text: str) -> None:
    assert read([text]) == Parts()


def test_arguments_are_given_as_they_come() -> None:
    calls = GrammarCalls(FORCED_HEAD)
    assert calls.feed('[{"name":"a","parameters":', is_last=False) == Parts()
    assert calls.feed('{"b":"}\\', is_last=False) == Parts(calls=[Call("a", '{"b":"}')])
    assert calls.feed("", is_last=False) == Parts()
    assert calls.feed('""', is_last=False) == Parts(more_arguments='\\""')
    assert calls.feed('},{"name":"c","parameters":{"d', is_last=True) == Parts(
        more_arguments="}", calls=[Call("c", '{"d')], is_cut=True
    )
    calls = GrammarCalls(FORCED_HEAD)
    calls.feed('[{"name":"a","parameters":{"b":"', is_last=False)
    assert calls.feed("\\", is_last=True) == Parts(more_arguments="\\", is_cut=True)
