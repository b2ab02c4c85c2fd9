# Two commands: `make demo` runs the main job on real data, `make test` proves it. Both set themselves up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check clean
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready
	OMP_NUM_THREADS=2 $(BIN)/python examples/segmentation.py
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demonstration.py

test: $(VENV)/.ready check
	$(BIN)/python -m pytest -n 2 tests

check: $(VENV)/.ready
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
