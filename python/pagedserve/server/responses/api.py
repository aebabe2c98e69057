"""Formats that all responses of the Responses API share."""

from dataclasses import replace
from typing import Final

from pagedserve.server.http.apis import OPENAI

# Root of the API's paths.
ROOT: Final = "/v1/responses"

# The last event of a stream has the whole response.
RESPONSES: Final = replace(OPENAI, stream_end=b"")
