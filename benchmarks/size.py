"""Measure the size of the code at some commits: files, lines and functions of bass_cli and kernels.

    python benchmarks/size.py b4d2e3c 489654f 3565a2a HEAD

All files are first formatted by `ruff format` at 100 columns, so that packed code does not look
shorter. Empty files and the functions of kernels (@triton.jit) do not count. Prints a table in
Markdown with a column for each commit.
"""

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FORMAT = (sys.executable, "-m", "ruff", "format", "--isolated", "--quiet", "--line-length", "100")
CODE = ("bass_cli", "kernels")


def functions(text):
    """Return the lines of every function, from its `def` to its end."""
    return [
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not any("jit" in ast.dump(one) for one in node.decorator_list)
    ]


def measure(commit):
    """Return the figures of a commit, by their names in the table."""
    archive = subprocess.run(["git", "archive", commit, *CODE], capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as stream:
            stream.extractall(name, filter="data")
        subprocess.run([*FORMAT, "--target-version", "py310", name], check=True)
        texts = [path.read_text(encoding="utf-8") for path in Path(name).rglob("*.py")]
    texts = [text for text in texts if text]
    lines = [len(text.splitlines()) for text in texts]
    lengths = [length for text in texts for length in functions(text)]
    return {
        "files": len(texts),
        "lines": f"{sum(lines):,}",
        "longest file": max(lines),
        "functions": f"{len(lengths):,}",
        "median function": f"{statistics.median(lengths):g}",
        "functions over 60 lines": sum(length > 60 for length in lengths),
        "longest function": max(lengths),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commits", nargs="+")
    commits = parser.parse_args().commits
    columns = [measure(commit) for commit in commits]
    print("| | " + " | ".join(commits) + " |\n|" + "---|" * (len(commits) + 1))
    for figure in columns[0]:
        print(f"| {figure} | " + " | ".join(str(column[figure]) for column in columns) + " |")


if __name__ == "__main__":
    main()
