# On a fresh Debian or Ubuntu with Python 3.10+ (and its venv module) and make:
#   make demo      trains a teacher and two students in one job, and reports
#   make test      lint and the quick tests (with SLURM's where it may be installed)
#   make test-all  the slow tests too
#   make lint      ruff, mypy, vague names and shellcheck;  make format;  make bench;  make setup
#   make docs      the pages as a site, in build/site
#   make roofline  shipped jobs on fake CUDA tensors: faults, kernels, the MFU that they allow

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO := runs/demo

# Nothing is compiled: DeepSpeed's kernels are optional, and this project uses none of them.
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set this: then each of the tests' processes would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all quick-tests all-tests lint format docs bench roofline slurm chromium
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || test ! -e .venv || \
	    { echo ".venv: not a virtual environment; move it away"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	    { rm -rf .venv; echo "Python's venv module is needed: apt-get install python3-venv"; exit 1; }
	@echo "Installing into .venv, once: PyTorch first (1 to 10 minutes, 1 GB; with CUDA some 5 GB) ..."
	@$(BIN)/python -m pip install --quiet pip==26.1
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	@echo "PyTorch is installed. Next: some 130 other packages (1 to 5 minutes, 1.3 GB) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    --build-constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "Installed: . .venv/bin/activate makes the command tandem available."

# The text, the tokenizer and the corpus are made once. The job resumes where it stopped, and says so
# when it is done.
demo: $(DEMO)-data/corpus.json
	@$(BIN)/tandem train configs/job/demo.yaml --nproc $$($(BIN)/python -c \
	    'import torch; n = torch.cuda.device_count(); print(max(k for k in (1, 2, 4, 8) if k <= (n or 2)))') || \
	    { code=$$?; [ $$code != 75 ] || echo "Saved: make demo resumes it."; exit $$code; }

$(DEMO)-data/corpus.json: $(DEMO)-tokenizer/tokenizer.json
	@$(BIN)/tandem data build $(DEMO)-text.txt --tokenizer $(<D) --out $(@D) --val-fraction 0.03

$(DEMO)-tokenizer/tokenizer.json: $(DEMO)-text.txt
	@$(BIN)/tandem tokenizer train $< --kind wordpiece --vocab-size 8192 --out $(@D)

$(DEMO)-text.txt: | $(READY)
	@$(BIN)/python -m data_pipeline.text.system_prose --out $@

# A test file at a time, the longest first (tests/order.py), with one thread: the tests start processes
# of their own, most of them as forks of a server that has imported everything (tests/fork_server.py).
# One worker more than there are cores, since tests also wait: for a scheduler, a timeout, other ranks.
# A container's quota of CPU time is not seen here: make test WORKERS=3
WORKERS ?= $$(($$(nproc) + 1))
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
    --no-loadscope-reorder

# mypy needs a core for 20 s where it has no cache, so the tests begin beside it.
test: $(READY) slurm chromium
	@$(MAKE) --no-print-directory -j2 lint quick-tests

test-all: $(READY) slurm chromium
	@$(MAKE) --no-print-directory -j2 lint all-tests

quick-tests:
	@$(PYTEST) -m "not slow"

all-tests:
	@TANDEM_TEST_ALL=1 $(PYTEST)
	@TANDEM_PLAIN_DEEPSPEED=1 $(PYTEST) -m "not slow" tests/trainer/test_exactness.py

# The tests of SLURM bring up a cluster of Debian's own packages; without them they skip.
slurm:
	@command -v slurmctld >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing SLURM for its tests, once (about a minute) ..."; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	        --no-install-recommends slurmctld slurmd slurm-client munge iproute2 bindfs; } >/dev/null 2>&1 || \
	    echo "SLURM could not be installed: its tests will skip."; \
	else \
	    echo "SLURM is not here and cannot be installed without root: its tests will skip."; \
	fi

# The pages are looked at in a browser; without one, those tests skip.
chromium:
	@command -v chromium >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing Chromium for the tests of pages, once (about a minute) ..."; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	        --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || \
	    echo "Chromium could not be installed: the tests of pages will skip."; \
	else \
	    echo "Chromium is not here and cannot be installed without root: its tests will skip."; \
	fi

SHELLCHECK = $(BIN)/shellcheck --shell=bash --severity=warning
lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python benchmarks/structure.py --words
	@$(SHELLCHECK) cluster/*.sh .ci/run
	@$(SHELLCHECK) --exclude=SC1090,SC2034 tests/cluster/golden/job.sbatch

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# A copy, because the site holds what the pages link to and nothing else of the repository.
PAGES := build/pages
docs: $(READY)
	@rm -rf $(PAGES) build/site && mkdir -p $(PAGES)
	@cp --parents -r *.md LICENSE docs benchmarks/*.md configs/*/*.yaml \
	    trainer/run_folder/metrics.py $(PAGES)
	@$(BIN)/zensical build --strict
	@echo "The site is build/site/index.html"

# The studies take longer, and go by name: benchmarks/study.py.
bench: $(DEMO)-data/corpus.json
	@for command in cotraining_speed.py "data_speed.py $(DEMO)-data" \
	    "faults.py configs/job/demo.yaml checkpoint.every=5" "model_speed.py --small"; do \
	    echo "benchmarks/$$command"; $(BIN)/python benchmarks/$$command || exit 1; done

# Needs no GPU, but a C++ compiler.
roofline: $(READY)
	@$(BIN)/python benchmarks/roofline.py
