"""The code inside the sandbox. Each program gets a fresh interpreter that imports this package.

It uses little of the standard library and nothing else, because every program pays for the
imports. bass itself starts it from sandbox/process.py.
"""
