"""Typed decisions: `POST /v1/systemone`."""
