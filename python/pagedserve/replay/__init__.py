"""Replay of scheduler decisions, without a model.

Two sources: a scenario (requests with planned lengths and a fake model, in the format of the
recorded decisions of vLLM 0.6.2) and a decision log that ``Scheduler(log=...)`` wrote.
"""
