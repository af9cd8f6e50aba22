# make demo: set up and show the whole path on bundled models.   make test: set up and run the test suite,
# make test-all with what is slow in it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SOURCES = $(shell find csrc -type f)

.PHONY: demo test test-all lint format clean

demo: $(VENV)/installed
	$(BIN)/qwen-patch demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n auto -m "slow or not slow"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/update_readme.py --check
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

# The set-up, again when what it installs from has changed. The package is installed in place: edits count at once.
$(VENV)/installed: pyproject.toml setup.py scripts/setup_environment.sh $(SOURCES)
	bash scripts/setup_environment.sh $(PYTHON) $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info qwen_patch/_native/*.so
