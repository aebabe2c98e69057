"""The engine: takes requests, runs steps and returns outputs."""
