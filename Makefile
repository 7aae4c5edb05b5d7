PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test compiled lint clean

$(BIN)/wattline: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[report,ui]"
	touch $@

$(VENV)/.dev: $(BIN)/wattline
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Llama-3-70B prefill on four H100s in full detail: every rank its own process.
demo: $(BIN)/wattline
	mkdir -p demo
	$(BIN)/wattline simulate --model llama3-70b --gpu h100-sxm-80gb --tp 4 --phase prefill --batch 2 \
	  --seq-len 4096 --trace demo/llama3-70b-tp4.json.gz --report demo/llama3-70b-tp4.html

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

# An environment of its own with the compiled engine (docs/compiled.md); it needs a C compiler.
compiled:
	test -x .venv-compiled/bin/python || $(PYTHON) -m venv .venv-compiled
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true .venv-compiled/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt ".[report,ui]"
	.venv-compiled/bin/wattline --version

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-compiled demo build dist
