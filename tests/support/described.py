"""Answers of a server beside what its ``/openapi.json`` says of them."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator


@dataclass(frozen=True)
class Description:
    """OpenAPI document of a server.

    Attributes:
        document: Its ``/openapi.json``; no object may have other fields than it names.
    """

    document: dict[str, Any]

    @classmethod
    def of(cls, http: httpx.Client) -> "Description":
        document = copy.deepcopy(http.get("/openapi.json").json())
        for schema in document["components"]["schemas"].values():
            if "properties" in schema:
                schema["additionalProperties"] = False
        return cls(document)

    def routes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Method, path and the content types of a success of every route."""
        for path, operations in self.document["paths"].items():
            for method, operation in operations.items():
                yield method, path, operation["responses"]["200"].get("content", {})

    def check(self, answer: httpx.Response) -> None:
        """A success in JSON has the fields that are described, and no others."""
        is_json = answer.headers.get("content-type", "") == "application/json"
        schema = self._schema_of(answer.request) if is_json and answer.is_success else None
        if schema is not None:
            answer.read()
            whole = schema | {"components": self.document["components"]}
            Draft202012Validator(whole).validate(answer.json())

    def _schema_of(self, request: httpx.Request) -> dict[str, Any] | None:
        """Schema of an answer in JSON; None for routes that are not shown."""
        for method, path, content in self.routes():
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
            if method.upper() == request.method and re.fullmatch(pattern, request.url.path):
                schema: dict[str, Any] = content["application/json"]["schema"]
                return schema
        return None
