"""``POST /v1/systemone``: decisions as clients of vLLM ask for them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedserve import LLM, Calibration, EngineArgs, LLMEngine
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served

STATE = {"order": 7, "messages": ["Where is it?", "Ça suffit."]}
QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"refunds": "money", "shipping": None},
    },
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": None},
    "mood": {"type": "score", "criteria": ["low", "mid", "high"]},
}


@pytest.fixture(scope="module")
def served(stand_in: Path) -> Any:
    args = EngineArgs(
        str(stand_in), num_gpu_blocks=256, dtype="float32", max_num_seqs=8, use_tqdm_on_load=False
    )
    options = ServerArgs(port=0, uvicorn_log_level="warning", served_model_name=("tiny",))
    with Served(lambda: LLMEngine(args), options) as running:
        running.check_answers()
        yield running
        running.wait_until_idle()


def decide(served: Served, **body: Any) -> httpx.Response:
    given = {"state": STATE, "questions": QUESTIONS} | body
    return served.http.post("/v1/systemone", json=given)


def test_a_response_has_vllms_form_and_the_answers_of_llm(served: Served, stand_in: Path) -> None:
    response = decide(served, model="tiny", request_id="mine", instructions="Sort letters.").json()
    with LLM(str(stand_in), dtype="float32", num_gpu_blocks=256, use_tqdm_on_load=False) as llm:
        expected = llm.decide(STATE, QUESTIONS, instructions="Sort letters.")
    assert (response["id"], response["model"]) == ("decision-mine", "tiny")
    assert response["object"] == "structured_decision"
    assert isinstance(response["created"], int)
    for name in ("answers", "diagnostics"):
        of_llm = getattr(expected, name)
        assert response[name] == {question: asdict(each) for question, each in of_llm.items()}
    assert response["usage"] == {"input_tokens": expected.num_prompt_tokens, "output_tokens": 3}
    assert list(response["answers"]) == list(QUESTIONS)
    assert response["answers"]["route"].keys() == {
        *("type", "choice", "probabilities", "confidence"),
    }
    assert response["answers"]["urgent"].keys() == {"type", "noul", "probabilities", "confidence"}
    assert response["answers"]["mood"].keys() == {
        *("type", "score", "legend", "probabilities", "confidence"),
    }


def test_answers_do_not_depend_on_requests_beside_them(served: Served) -> None:
    expected = decide(served).json()["answers"]

    def ask(number: int) -> dict[str, Any]:
        if number % 3 == 0:
            served.complete(prompt=f"{number} of them", max_tokens=10, ignore_eos=True)
        names = [*QUESTIONS][number % 3 :]
        found: dict[str, Any] = decide(
            served, questions={name: QUESTIONS[name] for name in names}
        ).json()["answers"]
        return found

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(ask, range(16)):
            assert answers == {name: expected[name] for name in answers}


def test_a_calibration_divides_by_its_temperatures(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = decide(served).json()["answers"]
    calibration = Calibration({"choice": 1.0, "noul": 2.0, "score": 1.0})
    monkeypatch.setattr(served.context, "calibration", calibration)
    answers = decide(served).json()["answers"]
    assert (answers["route"], answers["mood"]) == (before["route"], before["mood"])
    odds = [found["urgent"]["noul"] / (1 - found["urgent"]["noul"]) for found in (before, answers)]
    assert odds[1] == pytest.approx(odds[0] ** 0.5)


def test_any_json_is_a_state(served: Served) -> None:
    masses = set()
    states: list[Any] = ["text", ["a", 1], 3.5, None, {}]
    for state in states:
        response = decide(served, state=state)
        assert response.status_code == 200, response.text
        masses.add(response.json()["diagnostics"]["mood"]["label_mass"])
    assert len(masses) == 5


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"questions": {}}, "questions", "at least one"),
        ({"questions": {"q": {"type": "essay"}}}, "questions", "noul"),
        ({"questions": {"q": {"type": "noul", "weight": 1}}}, "questions", "weight"),
        ({"questions": {"q": {"type": "score", "criteria": ["a"]}}}, "questions", "two levels"),
        ({"questions": {"": {"type": "noul"}}}, "questions", "non-empty"),
        (
            {"questions": {str(i): {"type": "noul"} for i in range(9)}},
            None,
            "9 branches; max_num_seqs is 8",
        ),
        ({"images": ["https://x/y.png"]}, "images", "not supported here"),
        ({"audio": ["https://x/y.wav"]}, "audio", "not supported here"),
        ({"videos": ["https://x/y.mp4"]}, "videos", "not supported here"),
        ({"stream": True}, "stream", "stream is no field of this request"),
        ({"temperature": 1}, "temperature", "temperature is no field of this request"),
        ({"cache_salt": ""}, None, "cache_salt"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "thinking"),
        ({"state": "word " * 600}, None, "max_model_len is 512"),
    ],
)
def test_refusals_name_what_is_wrong(
    served: Served, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = decide(served, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    if param is not None:
        assert error["param"].split(".")[0] == param
    served.wait_until_idle()


def test_variables_of_the_template_that_the_server_sets_by_default(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = served.context.text
    first = "{% if enable_thinking %}{{ raise_exception('x') }}{% endif %}{{ mood }}"
    monkeypatch.setattr(text, "chat_template", first + text.shown_template)
    plain = decide(served).json()["usage"]["input_tokens"]
    variables = {"mood": "low or high?", "enable_thinking": True}
    monkeypatch.setattr(text, "args", replace(text.args, default_chat_template_kwargs=variables))
    assert decide(served).json()["usage"]["input_tokens"] > plain
    other = decide(served, chat_template_kwargs={"mood": ""}).json()
    assert other["usage"]["input_tokens"] == plain


def test_a_missing_state_and_an_unknown_model(served: Served) -> None:
    response = served.http.post("/v1/systemone", json={"questions": QUESTIONS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "state"
    assert decide(served, model="other").status_code == 404


def test_media_lists_that_are_empty_attach_nothing(served: Served) -> None:
    assert decide(served, images=[], audio=[], videos=[], priority=3).status_code == 200


def test_how_long_a_model_is_kept_is_passed_over(served: Served) -> None:
    """Ollama's package sends it."""
    assert decide(served, keep_alive="5m").status_code == 200
