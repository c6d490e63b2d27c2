# Two commands for a newcomer: `make demo` trains on two processes, `make test` runs the tests.
# Both set up .venv first (Python >= 3.11): `make demo` installs what the demo needs, `make docs` what the site needs, and every other
# target all of it.
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and the like are pip's own to read.

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := -m distributed.cli train --script examples/train.py --backend pytorch-ddp --nproc-per-node 2
DEMO_EXTRAS := torch,plot,report,examples
DEMO_STAMP := $(VENV)/.demo
DOCS_STAMP := $(VENV)/.docs
STAMP := $(VENV)/.installed
HOROVOD_STAMP := $(VENV)/.horovod
HOROVOD_WITH ?=
# Four test processes, each of which runs whole files: most tests start workers and wait for them. tests/conftest.py says which
# files come first.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 25

.PHONY: demo test conformance test-docs test-more test-full test-cluster test-gpu soak check format docs bench screenshots docker-check release clean horovod
.DEFAULT_GOAL := demo

demo: $(DEMO_STAMP)
	$(BIN)/python $(DEMO)

test: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST)

# The conformance suite on the engines of torch that `make test` tests in other ways only, Ray on one machine, and further kills.
conformance: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST) -m 'conformance and not full' --dist loadgroup

# `make test` with every long matrix: all numbers of processes of every backend, and more kills and starts.
test-full: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST) -m 'full or not cluster'

# The samples of the documentation, long examples, and the site. `make test-full` has the longest ones.
test-docs: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST) -m 'docs and not full' --dist loadgroup

# `make conformance` and `make test-docs` at once, which takes less time than one after the other.
test-more: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST) -m '(conformance or docs) and not full' --dist loadgroup

# Runs on several machines, which are network namespaces here, and on clusters of Ray: as root, with iproute2 and nftables (apt.txt).
# Two test processes, because each test starts the processes of several machines, and waits for some of them for a limited time.
test-cluster: $(STAMP) $(HOROVOD_STAMP)
	$(PYTEST) -m 'cluster and not full' --dist loadgroup --loadscope-reorder --numprocesses 2

# Half an hour of training under random faults, and 400 short jobs: as root, about an hour.
soak: $(STAMP)
	$(BIN)/python -m tests.faults.soak --minutes 30 --jobs 200

# On a machine with a GPU, in eight minutes, with its own Python (torch with CUDA, pytest) and nothing installed. The tests
# themselves can be tried out on CPUs: GPU_REHEARSAL=cpu make test-gpu GPU_PYTHON=.venv/bin/python
test-gpu:
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) tests/gpu/run.py

# Horovod for the installed torch; its wheel is kept outside of the checkout. `make horovod HOROVOD_WITH="mpi tensorflow"`.
horovod: $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python scripts/build_horovod.py --with $(HOROVOD_WITH)

# For the tests: with everything that is here, and without it where there is no compiler (its tests are skipped then).
$(HOROVOD_STAMP): $(STAMP) scripts/build_horovod.py scripts/horovod_cxx.sh
	PIP_CONSTRAINT=constraints.txt $(BIN)/python scripts/build_horovod.py --optional mpi tensorflow --or-skip
	touch $@

# What a change must pass before it is committed.
check: $(STAMP) $(HOROVOD_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site, in build/docs/index.html. A warning, such as a link between pages that leads nowhere, is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -E -j 2 -d build/doctrees docs build/docs

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/startup.py

# The pictures in docs/images, from real runs. Needs chromium (apt.txt).
screenshots: $(STAMP)
	$(BIN)/python scripts/draw_run.py
	$(BIN)/python scripts/screenshots.py

# What the Dockerfiles install, in clean directories without a container engine. The CUDA sets, gigabytes, are only resolved.
docker-check:
	$(PYTHON) scripts/check_docker_install.py
	$(PYTHON) scripts/check_docker_install.py --variant cuda --dry-run

# Wheel and source archive in dist/, and the demo with nothing but the wheel. Uploads nothing.
release:
	$(PYTHON) scripts/release.py $(DEMO_EXTRAS) $(DEMO)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints pin the build's own requirements too. Workaround (pip 23.2, pypa/pip#13534; may go when the oldest pip used has
# --build-constraint): pip applies them to a build only from the variable.
# Do not let pip compile all modules: this takes longer than the rest of the installation, and Python compiles and stores each module
# when it is first imported. With PYTHONDONTWRITEBYTECODE, Python stores nothing, and each process would compile its imports again.
# The modules are then compiled here.
$(DEMO_STAMP): EXTRAS := $(DEMO_EXTRAS)
$(DOCS_STAMP): EXTRAS := docs
$(STAMP): EXTRAS := all
$(STAMP): SERVES := $(DEMO_STAMP) $(DOCS_STAMP)
$(DEMO_STAMP) $(DOCS_STAMP) $(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-compile -e '.[$(EXTRAS)]'
	$(if $(PYTHONDONTWRITEBYTECODE),$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib distributed $(if $(filter all,$(EXTRAS)),tests) || true)
	touch $(SERVES) $@
