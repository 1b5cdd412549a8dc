"""Check and write the PNG file of a chart, for `bass bench` and `bass eval`.

The charts are drawn in bench/plot.py and eval/chart.py.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from bass_cli.errors import MachineError, UserError
from bass_cli.io.places import check_place, refuse_foreign
from bass_cli.io.saving import write_file

_SIGNATURE = b"tEXtSoftware\0bass"  # the PNG text chunk that names the program


def check(file: str, *, overwrite: bool) -> None:
    """Raise UserError or MachineError before any measurement if `save` could not work later.

    A file that is not a chart of bass is not replaced.
    """
    if Path(file).suffix.lower() != ".png":
        raise UserError(f"--plot {file}: the file must end in .png")
    check_place(f"--plot {file}", file)
    if not overwrite:
        refuse_foreign(
            f"--plot {file}",
            file,
            lambda content: _SIGNATURE in content[:1024],
            kind="a chart of bass",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(
            "--plot needs matplotlib, which is not installed here: pip install 'bass-cli[plot]'"
        )


def save(figure: Any, file: str) -> None:
    """Write the figure to a PNG file atomically. MachineError if it cannot be written."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=144, metadata={"Software": "bass"})
    try:
        write_file(file, picture.getvalue())
    except OSError as error:
        raise MachineError(f"--plot {file}: cannot write the chart: {error.strerror}") from None
