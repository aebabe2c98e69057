"""OpenAI's Responses API: ``/v1/responses``, on top of chat completions."""
