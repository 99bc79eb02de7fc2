# make train   a small GPT on this machine, stock and evenly, in one run            make check     quick feedback
# make test    the tests of every change    make test-all   every case (PART=3/10: a tenth of what `make test` leaves out)
# make test-changed  of these what a change can break       make test-costs   what each case costs
# make check-cuda    more of them on a GPU that is rehearsed                   make explore   drawn tests, drawn anew
# make mutants planted faults, each to be noticed (PART=3/20: a part)            make docs      generated pages
# make without PLUGIN=mesh  what `make check` asks, in a copy without a plugin
# make test-newest   Megatron-Core's tests on its newest version; test-older: DeepSpeed's on an older one
# make test-today    Transformers' and TRL's tests on the versions that pip gives, TRL's also on two earlier ones
# make test-hosts    LLaMA-Factory, Axolotl, ms-swift and Ray Train, each in an environment of its own
# make figures      the README's figures measured again: ROWS=pairs,verify; without ROWS their list, with minutes
# make site    the documents as web pages, into build/site; a warning is an error
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
FLOORS := core data runtime plugins integrations patches training commands
# Test files go to this many processes, each file to one of them; WORKERS=0 runs all in one, as --pdb needs. Some tests
# wait for ranks that hang, so two cores have work for three processes.
WORKERS ?= 3
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/pytest $(SPREAD)
# The same draws whenever a commit is tested, and others at the next one.
DRAWS := --hypothesis-seed=$(shell git rev-list --count HEAD 2>/dev/null || echo 0)
# Interpreters, of which tests start hundreds, compile nothing twice.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export GLOO_SOCKET_IFNAME ?= lo

.PHONY: train test test-all test-costs test-changed check-cuda test-newest check-newest test-older test-today test-hosts check quick without explore mutants lint types contracts docs site figures clean

train: $(READY)
	mkdir -p runs/quickstart
	$(BIN)/evenload train recipes/quickstart.yaml --against stock,in_order --trace runs/quickstart/trace.json \
	    --plot runs/quickstart/steps.png --report runs/quickstart/report.html

test: $(READY)
	$(PYTEST) $(DRAWS) -m "not gpu and not cuda and not full"

# Of these the files that a change since BASE can break, by who imports what; `.ci/run` runs all.
BASE ?= HEAD
test-changed: $(READY)
	files="$$(PYTHONPATH=tests $(BIN)/python -m harness.changed $(BASE))"; \
	    test -z "$$files" || $(PYTEST) $(DRAWS) -m "not gpu and not cuda and not full" $$files

# All cases of all products, and long forms of what `make test` has short; PART=3/10: a tenth of what it leaves out.
test-all: $(READY)
	$(PYTEST) $(DRAWS) --hypothesis-profile=full -m "not gpu and not cuda$(if $(PART), and full)" \
	    $(if $(PART),--part $(PART))

# The same as `make test`, with what each case costs: a table by folder, and the dearest cases.
test-costs: $(READY)
	mkdir -p build
	$(PYTEST) $(DRAWS) -m "not gpu and not cuda and not full" --costs=build/costs.jsonl

# The recipes, scripts and proofs that `make test` leaves out, on a rehearsed GPU: see tests/rehearsal.
check-cuda: $(READY)
	$(PYTEST) -m cuda -q tests/rehearsal $(if $(PART),--part $(PART))

# The same tests on other versions of the hosts.
NEWEST := integrations/megatron training/proof/test_compare.py commands/test_train.py patches
OLDER := integrations/deepspeed/test_engine.py integrations/deepspeed/unmodified
# On CPUs the older one's ZeRO 3 computes with weights that gloo has not brought yet: see docs/support.md.
LATE := test_gradients_are_those_of_plain_training[3] test_planted_faults_are_caught[3

test-newest: .venv-newest/ready
	.venv-newest/bin/python -m pytest $(SPREAD) -m "not gpu and not full" $(addprefix tests/,$(NEWEST))

# What CI runs of them: a proof, a script and hybrid models; and recipes and loops on a rehearsed GPU.
check-newest: .venv-newest/ready
	.venv-newest/bin/python -m evenload verify recipes/slices.yaml model.num_layers=2 model.hidden_size=32 \
	    model.num_attention_heads=4 model.num_query_groups=2 data.max_length=512 train.global_batch_size=8 train.dtype=fp64
	.venv-newest/bin/python -m pytest -q -m "not gpu and not full" tests/integrations/megatron/unmodified/test_hybrid.py \
	    tests/integrations/megatron/unmodified/test_script.py::test_in_float64_the_same_gradients_and_weights
	.venv-newest/bin/python -m pytest -q tests/rehearsal -k "loop_of_megatron or (a_gpu and (moe or slices or pipeline))"

test-older: .venv-older/ready
	.venv-older/bin/python -m pytest $(SPREAD) -m "not gpu and not full" $(addprefix tests/,$(OLDER)) \
	    $(addprefix --deselect tests/integrations/deepspeed/test_engine.py::,$(LATE))

# The tests of Transformers and TRL on what pip gives; those of TRL's Trainers also on two earlier releases.
TODAY := tests/hosts tests/integrations/huggingface
RELEASES := trl114 trl113

test-today: $(patsubst %,.venv-%/ready,today $(RELEASES))
	.venv-today/bin/python -m pytest $(SPREAD) -m "not gpu and not cuda and not full" $(TODAY)
	for release in $(RELEASES); do .venv-$$release/bin/python -m pytest $(SPREAD) \
	    -m "not gpu and not cuda and not full" -k "trl or sft or dpo" $(TODAY) || exit 1; done

# Programs that people fine-tune with, each by its own command in an environment of its own.
PROGRAMS := llamafactory axolotl swift ray

test-hosts: $(PROGRAMS:%=.venv-%/ready)
	for program in $(PROGRAMS); do .venv-$$program/bin/python -m pytest -q tests/programs || exit 1; done

# Types and contracts, which take one core half a minute, next to the tests that start no ranks.
check: $(READY)
	$(MAKE) --output-sync=target -j4 lint types contracts quick

quick: WORKERS := 2
quick: $(READY)
	$(PYTEST) $(DRAWS) -m "not gpu and not slow and not full" -q

# Of a copy of the tree without a plugin (PLUGIN=mesh) and its tests; tests of others that ask for it are skipped there.
without: $(READY)
	$(BIN)/python tests/harness/without.py $(PLUGIN)

# Tests of any plan, any lengths, any schedule, on inputs that no run has seen.
explore: $(READY)
	$(PYTEST) -m "(hypothesis or drawn) and not gpu" --hypothesis-profile=explore -q

# Faults planted in copies of the code, two at a time; each has a command that must notice it.
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
	$(BIN)/python docs/reference.py

site: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going docs build/site

figures: $(READY)
	mkdir -p build
	$(BIN)/python benchmarks/figures.py $(if $(ROWS),--rows $(ROWS) --runs $(or $(RUNS),2) --out build/figures.json)

# torch first and by name: other packages would bring another build of it.
$(READY): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --group dev
	$(BIN)/pip install --quiet --editable .
	touch $@

# What a dependency group names, over all else of $(VENV); made in seconds. pip refuses megatron-core 0.17 and newer on
# Python 3.11, where they work.
.venv-%/ready: $(READY)
	rm -rf .venv-$*
	$(BIN)/python -m venv --without-pip .venv-$*
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    > "$$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over.pth"
	.venv-$*/bin/python -m pip install --quiet --ignore-requires-python --no-deps --group $*
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info
