"""Typed decisions: probabilities of the answers to questions about a state.

`questions` parses questions and gives each option a label, `prompts` makes one prompt of a state
and all questions, and `answers` turns the log-probabilities of the labels into answers.
"""
