"""Explain errors of the Hugging Face hub's client: one sentence on the cause, one on the remedy.

Models are downloaded in formats/sources.py, datasets in io/readers.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from bass_cli.errors import MachineError, UserError


def refusal(source: str, error: Exception, *, remedy: str) -> UserError:
    """Make the error to raise for an error of the hub's client.

    It is a MachineError if the hub could not be reached. `remedy` says how to work without the
    network; it becomes a line of its own.
    """
    from huggingface_hub import constants, errors

    chain = list(_chain(error))
    login = "log in there (hf auth login, or HF_TOKEN)"
    kind: type[UserError] = UserError
    if constants.HF_HUB_OFFLINE:
        kind, remedy = MachineError, f"unset HF_HUB_OFFLINE; or {remedy}"
        cause = f"it is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    elif _any(chain, errors.GatedRepoError):
        cause, remedy = (
            "the Hugging Face hub does not give it to everybody",
            f"accept its terms and {login}; or {remedy}",
        )
    elif _any(chain, errors.RepositoryNotFoundError):
        cause = "neither a path that exists nor known to the Hugging Face hub"
        remedy = f"check the name, or {login} if it is private; or {remedy}"
    elif _any(chain, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError):
        kind, reason = MachineError, _line(chain[-1])
        cause = f"it is not on this machine, and the hub cannot be reached ({reason})"
    else:
        cause = (
            f"neither a path that exists nor to be had from the Hugging Face hub: {_line(error)}"
        )
    return kind(f'"{source}": {cause}', remedy)


def _any(chain: list[BaseException], *kinds: type) -> bool:
    return any(isinstance(one, kinds) for one in chain)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
