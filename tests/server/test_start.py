"""How a server starts: where it listens, what it refuses at once, and signals while it loads."""

import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from pagedserve.cli import main
from tests.server.conftest import Process, Serve
from tests.server.test_completions import PROMPT


def test_a_port_in_use_is_said_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen at --host 127.0.0.1, --port {port}: Address already in use\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "no.such.host.invalid"], "cannot listen at --host no.such.host.invalid"),
        (["--uds", "{}/nowhere/s"], "uds: cannot listen at {}/nowhere/s: No such file"),
        (["--uds", "{}/notes"], "uds: cannot listen at {}/notes: Address already in use"),
        (["--ssl-certfile", "{}/none"], "cannot use ssl_certfile {}/none: No such file"),
        (["--ssl-certfile", "{}/notes"], "cannot use ssl_certfile {}/notes"),
        (["--ssl-keyfile", "{}/notes"], "ssl_keyfile or ssl_ca_certs is given without ssl_cert"),
        (["--ssl-cert-reqs", "3"], "ssl_cert_reqs is 3; it must be an integer, from 0 to 2"),
        (
            ["--ssl-certfile", "{}/cert.pem", "--ssl-keyfile", "{}/key.pem", "--ssl-ciphers", "X"],
            "cannot use ssl_ciphers X",
        ),
        (["--port", "65536"], "port is 65536; it must be an integer, from 0 to 65535"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    (tmp_path / "notes").write_text("no socket, no certificate")
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    given = [option.format(tmp_path) for option in options]
    assert main(["serve", "no-such-model", *given]) == 2
    assert said.format(tmp_path) in capsys.readouterr().err


def test_a_default_that_is_no_variable_of_a_template_ends_the_start(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--default-chat-template-kwargs", '{"tokenize": true}', "--port", "0"]
    assert main(["serve", str(stand_in), "--num-gpu-blocks", "64", *given]) == 2
    said = "default_chat_template_kwargs has tokenize, which is no variable of a template"
    assert said in capsys.readouterr().err


def test_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    for _ in range(2):  # what the first leaves behind is no hindrance to the second
        with serve(uds=path):
            transport = httpx.HTTPTransport(uds=path)
            with httpx.Client(transport=transport, base_url="http://server") as client:
                assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200
            assert main(["serve", "smollm2", "--uds", path]) == 2  # somebody listens


def test_tls(serve: Serve, tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.create_default_context()
    certificate = authority.issue_cert("127.0.0.1")
    authority.configure_trust(context)
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    with serve(**files) as served:
        assert str(served.http.base_url).startswith("https://")
        with httpx.Client(base_url=served.http.base_url, verify=context) as client:
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):  # of whom nobody knows
            served.http.get("/health")


def test_the_server_is_imported_while_the_engine_begins() -> None:
    program = (
        "import sys, pagedserve.server.start\n"
        "print({'fastapi', 'uvicorn', 'pydantic', 'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_server_that_is_still_loading(
    endless: str, tmp_path: Path, number: int
) -> None:
    process = Process(tmp_path / "log", endless, "--load-format", "dummy")
    answer = httpx.get(f"{process.url}/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert process.end(number) == 0
    assert "Traceback" not in process.log
