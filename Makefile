# make train   a small GPT on this machine, stock and evenly, in one run     make check     quick feedback
# make test    every test that needs no GPU                                  make explore   its drawn tests, drawn anew
# make mutants faults planted one by one, each to be noticed (PART=3/10: a tenth)            make docs      generated pages
# make site    the documents as web pages, into build/site; a warning is an error
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
FLOORS := core data runtime plugins integrations patches commands
# Test files go to this many processes, each file to one of them; WORKERS=0 runs all in one, as --pdb needs. Some tests
# wait for ranks that hang, so two cores have work for three processes.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo

.PHONY: train test check explore mutants lint types contracts docs site clean

train: $(READY)
	mkdir -p runs/quickstart
	$(BIN)/evenload train recipes/quickstart.yaml --against stock,in_order --trace runs/quickstart/trace.json \
	    --plot runs/quickstart/steps.png --report runs/quickstart/report.html

test: $(READY)
	$(PYTEST) -m "not gpu"

check: lint types contracts
	$(PYTEST) -m "not gpu and not slow" -q

# Tests of any plan, any lengths, any schedule, on inputs that no run has seen.
explore: $(READY)
	$(PYTEST) -m "hypothesis and not gpu" --hypothesis-profile=explore -q

# Faults planted in copies of the code; each has a command that must notice it.
mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(if $(PART),--part $(PART))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Through a link, so that the checkout's folder may have any name.
types: $(READY)
	mkdir -p $(VENV)/typed && ln -sfn "$(CURDIR)" $(VENV)/typed/evenload
	cd $(VENV)/typed && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
	    -m evenload.cli -m evenload.api -m evenload.__main__ $(addprefix -p evenload.,$(FLOORS))

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

docs: $(READY)
	$(BIN)/evenload schema > docs/recipe.schema.json
	$(BIN)/python -m evenload.patches.support > docs/support.md

site: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going docs build/site

# torch first and by name: other packages would bring another build of it.
$(READY): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --group dev
	$(BIN)/pip install --quiet --editable .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
