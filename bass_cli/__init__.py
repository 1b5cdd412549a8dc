"""bass: many exact samples per prompt, by batched speculative sampling."""

__version__ = "0.1.0"
