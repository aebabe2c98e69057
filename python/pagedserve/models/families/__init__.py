"""Families of models: what is known of each (`table`), and what a loaded model needs for it."""
