"""Where a follower's process begins.

It is a module of its own because follower.py imports torch, which here happens in the way of a
command.
"""

from __future__ import annotations

from bass_cli.system.postponed import import_torch


def main(replies: int) -> None:
    """Do `main` of follower.py."""
    import_torch()
    from bass_cli.tensor_parallel import follower

    follower.main(replies)
