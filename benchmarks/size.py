"""Measure the code of bass_cli and kernels at some commits: files, lines, functions, importers.

    python benchmarks/size.py b4d2e3c 489654f 3565a2a HEAD

All files are first formatted by `ruff format` at 100 columns, so that packed code does not look
shorter. Empty files and the functions of kernels (@triton.jit) do not count. Prints a table in
Markdown with a column for each commit: the whole first, then files and lines of each package.
"""

import argparse
import ast
import collections
import importlib.util
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


def single_importers(files):
    """Return the paths of the modules that exactly one other module imports.

    files: texts by path, the package's folder first.
    """
    paths = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in files
    }
    importers = collections.defaultdict(set)
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = path.rpartition("/")[0].replace("/", ".")
                origin = importlib.util.resolve_name(
                    "." * node.level + (node.module or ""), package
                )
                names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in paths and paths[name] != path:
                    importers[paths[name]].add(path)
    return [path for path, found in importers.items() if len(found) == 1]


def measure(commit):
    """Return the figures of a commit, by their names in the table."""
    archive = subprocess.run(["git", "archive", commit, *CODE], capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as stream:
            stream.extractall(name, filter="data")
        subprocess.run([*FORMAT, "--target-version", "py310", name], check=True)
        files = {
            str(path.relative_to(name)).removeprefix("kernels/"): text
            for path in sorted(Path(name).rglob("*.py"))
            if (text := path.read_text(encoding="utf-8"))
        }
    lines = {path: len(text.splitlines()) for path, text in files.items()}
    lengths = [length for text in files.values() for length in functions(text)]
    single = single_importers(files)
    packages = collections.defaultdict(list)
    for path, count in lines.items():
        packages[path.split("/")[0 if path.count("/") == 1 else 1]].append(count)
    return {
        "files": len(files),
        "lines": f"{sum(lines.values()):,}",
        "longest file": max(lines.values()),
        "functions": f"{len(lengths):,}",
        "median function": f"{statistics.median(lengths):g}",
        "functions over 60 lines": sum(length > 60 for length in lengths),
        "longest function": max(lengths),
        "modules with a single importer": len(single),
        "of these under 150 lines": sum(lines[path] < 150 for path in single),
        **{f"`{name}`": f"{len(one)}, {sum(one):,}" for name, one in sorted(packages.items())},
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commits", nargs="+")
    commits = parser.parse_args().commits
    columns = [measure(commit) for commit in commits]
    print("| | " + " | ".join(commits) + " |\n|" + "---|" * (len(commits) + 1))
    for figure in dict.fromkeys(key for column in columns for key in column):
        cells = (str(column.get(figure, "-")) for column in columns)
        print(f"| {figure} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
