"""Chat templates in the style of published ones, from tests/model/data. No tests here."""

from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "model" / "data"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text()


CHATML, LLAMA3, MISTRAL = _read("chatml"), _read("llama3"), _read("mistral")
THINKING = _read("thinking")  # reads `enable_thinking`, as that of Qwen3
OPENED = _read("opened")  # always opens the thinking part, as that of QwQ
