"""The page at ``/`` in a real browser, over its debugging protocol, against the real model."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.conftest import Process

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """A page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message: dict[str, Any] = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        while not await self.value(expression):  # noqa: ASYNC110  # a page has no events for us
            await asyncio.sleep(0.05)


@asynccontextmanager
async def browsing(url: str, folder: Path) -> AsyncIterator[Page]:
    assert BROWSER is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(  # noqa: ASYNC220  # it runs beside the loop
            [BROWSER, *options, f"--user-data-dir={folder}/profile", url], stderr=stderr
        )
    try:
        while not (found := re.search(r"ws://(127\.0\.0\.1:\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1]}/json/list") as answer:
                (page,) = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_chat_in_the_browser(smollm2_server: Process, tmp_path: Path) -> None:
    async def test() -> None:
        async with browsing(smollm2_server.url, tmp_path) as page:
            await page.until("find('model').textContent === 'smollm2'")
            assert "KV cache" in await page.value("find('state').textContent")
            await page.value("find('text').value = 'Say hello.'; find('form').requestSubmit()")
            await page.until("running === null && messages.length === 2")
            user, assistant = await page.value("messages")
            assert (user["content"], assistant["role"]) == ("Say hello.", "assistant")
            assert assistant["content"]  # drawn at random
            shown = await page.value("document.querySelector('.assistant').textContent")
            assert shown == assistant["content"]
            assert re.match(
                r"\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s",
                await page.value("find('rate').textContent"),
            )
            # System prompt and settings are part of the next request.
            await page.value("find('system').value = 'Be brief.'; find('temperature').value = '0'")
            sent = await page.value("request()")
            assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
            assert (sent["temperature"], sent["max_tokens"]) == (0, 512)
            # The box stays at the bottom, whatever the length of the chat.
            below = "document.body.getBoundingClientRect().bottom <= innerHeight"
            assert await page.value(f"show('user', 'long\\n'.repeat(200)) && {below}")
            # Stopping an answer in the middle keeps what came.
            await page.value("send('Count to one hundred.')")
            await page.until("document.querySelectorAll('.assistant')[1]?.textContent.length > 5")
            await page.value("find('stop').click()")
            await page.until("running === null && messages.length === 4")

    asyncio.run(asyncio.wait_for(test(), 120))
