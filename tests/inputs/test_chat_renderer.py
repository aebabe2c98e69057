"""Chat templates as the renderer shows them messages."""

import pytest

from pagedserve.inputs.chat_renderer import render_chat


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_all_its_names(name: str) -> None:
    text = render_chat(
        "{% set m = messages[0] %}{{ m.reasoning }}{{ m.reasoning_content }}{{ m.thinking }}",
        [{"role": "assistant", "content": "", name: "so "}],
        tools=None,
        documents=None,
        add_generation_prompt=False,
        continue_final_message=False,
        variables={},
    )
    assert text == "so so so "
