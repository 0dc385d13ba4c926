# `make test` and `make demo` set everything up on a bare machine with Python 3.10-3.13.
#
#   TORCH=existing   use the torch that `python3` already has (a CUDA build, say), in a .venv-existing of its own
#   PYTHON=python3.12  another interpreter
PYTHON ?= python3
TORCH ?= install
ifeq ($(TORCH),existing)
VENV ?= .venv-existing
else
VENV ?= .venv
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup test demo lint gpu browser clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
ifeq ($(TORCH),existing)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -c "import torch; print('using torch', torch.__version__)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[engine,dev]"
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[engine,dev]"
endif
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

gpu: setup
	$(BIN)/python -m pytest -m gpu

browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[browser]"
	$(BIN)/python -m pytest tests/browser

demo: setup
	$(BIN)/sixbit generate --model reference --preset balanced --precision dmpq --cache tdc --compare \
		--prompt "a red star moves right on a white background" --out out/demo

clean:
	rm -rf .venv .venv-existing out build dist *.egg-info
