"""The inside of the sandbox: what runs in the fresh interpreter that is started for every program.

Standard library only, and little of it, since it is imported once a program. The other side is
sandbox/programs.py.
"""
