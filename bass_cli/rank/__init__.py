"""Choose among the n samples of a prompt: rankers behind one protocol (ranking.py).

Rankers see prompts and samples, never the tests of a task. eval/ reports Pass@First by each of
them, and generation.py keeps the best samples.
"""
