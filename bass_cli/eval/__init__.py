"""Scoring what a model wrote: the sandbox for programs, and the benchmarks that need it."""
