"""Answers of a server beside what its ``/openapi.json`` says of them."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator


@dataclass(frozen=True)
class Description:
    """OpenAPI document of a server.

    Attributes:
        document: Its ``/openapi.json``; no object may have other fields than it names,
            unless it says so.
    """

    document: dict[str, Any]

    @classmethod
    def of(cls, http: httpx.Client) -> "Description":
        document = copy.deepcopy(http.get("/openapi.json").json())
        for schema in document["components"]["schemas"].values():
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)
        return cls(document)

    def routes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Method, path and the content types of a success of every route."""
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                yield method, path, operation["responses"]["200"].get("content", {})

    def check(self, answer: httpx.Response) -> None:
        """Check that a success in JSON has the described fields, and no others."""
        self._check(answer, "application/json", lambda text: [text])

    def check_events(self, answer: httpx.Response) -> None:
        """Check that the data of each event has the described fields, and no others."""
        data = re.compile(r"^data: (\{.*)$", re.MULTILINE)
        assert self._check(answer, "text/event-stream", data.findall), answer.text

    def check_lines(self, answer: httpx.Response) -> None:
        """Check that each line has the described fields, and no others."""
        assert self._check(answer, "application/x-ndjson", str.splitlines), answer.text

    def _check(
        self, answer: httpx.Response, kind: str, split: Callable[[str], Sequence[str]]
    ) -> int:
        """Validate the objects of a success of a content type; return their number."""
        given = answer.headers.get("content-type", "").partition(";")[0]
        is_known = given == kind and answer.is_success
        schema = self._schema_of(answer.request, kind) if is_known else None
        if schema is None:
            return 0
        answer.read()
        whole = schema | {"components": self.document["components"]}
        parts = split(answer.text)
        for part in parts:
            Draft202012Validator(whole).validate(json.loads(part))
        return len(parts)

    def _schema_of(self, request: httpx.Request, kind: str) -> dict[str, Any] | None:
        """Schema of an answer of a content type, or of its parts; None for routes not shown."""
        for method, path, content in self.routes():
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
            if method.upper() == request.method and re.fullmatch(pattern, request.url.path):
                schema: dict[str, Any] = content[kind]["schema"]
                return schema
        return None
