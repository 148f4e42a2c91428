# Every action of the course. `make` alone prints this list.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.complete
EXTRAS := grade,lab,models,matrix,dev

LAB      ?=
STRICT   ?=
REPO_URL ?=
PROSE    ?= en
PROFILE  ?= Q-CUDA-MECHANISM
LABEL    ?= local
FORCE    ?=
MODEL    ?=
FILES    ?= $(filter-out %.schema.json,$(wildcard results/*.json))
STUDENT  ?=
JOBS     ?=
SCHEDULER ?=
DB       ?=
TO       ?=
QUICK    ?=
CACHE    ?=
GRADING  ?=
STUDENTS ?= 40
ARGS     ?=

.PHONY: help
help: ## Print this list
	@echo "KV Cache Quantization Lab. Usage: make TARGET [NAME=value]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' \
	  | while IFS='|' read -r target text; do printf '%-13s %s\n' "$$target" "$$text"; done

# The environment is complete when its stamp is newer than the files it was made from
# and its interpreter still runs; anything else makes it again.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(BIN)/python -c 'print(1)' 2>/dev/null),1)
$(shell rm -rf $(VENV))
endif
endif

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "This course needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Say which to use: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Make .venv with the tested versions (the other targets do it when needed)

.PHONY: grade
grade: $(STAMP) ## Grade your notebooks and print the scoreboard (LAB=..., STRICT=1)
	@$(BIN)/kvlab grade --lab "$(LAB)" $(if $(filter-out 0,$(STRICT)),--strict)

.PHONY: autograde
autograde: $(STAMP) ## Grade all of submitted/, in a sandbox (LAB=, STUDENT=, JOBS=, SCHEDULER=, DB=, FORCE=1)
	@$(BIN)/kvlab autograde --lab "$(LAB)" --student "$(STUDENT)" --jobs "$(or $(JOBS),0)" --scheduler "$(SCHEDULER)" --db "$(DB)" $(if $(filter-out 0,$(FORCE)),--force)

.PHONY: feedback
feedback: $(STAMP) ## Write each student's page to feedback/ (LAB=, STUDENT=, JOBS=, DB=)
	@$(BIN)/kvlab feedback --lab "$(LAB)" --student "$(STUDENT)" --jobs "$(or $(JOBS),0)" --db "$(DB)"

.PHONY: export
export: $(STAMP) ## Write all scores as CSV and JSON (LAB=, STUDENT=, DB=, TO=grades.csv)
	@$(BIN)/kvlab export --lab "$(LAB)" --student "$(STUDENT)" --db "$(DB)" $(if $(TO),--to "$(TO)")

.PHONY: bundle
bundle: $(STAMP) ## Pack the course for students, without answers and hidden tests (TO=, REPO_URL=, PROSE=en)
	@$(BIN)/kvlab bundle --repo-url "$(REPO_URL)" --language "$(PROSE)" $(if $(TO),--to "$(TO)")

.PHONY: lab
lab: $(STAMP) ## Open JupyterLab with nbgrader's extensions
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter lab $(ARGS)

.PHONY: test
test: $(STAMP) ## Run the tests (ARGS="-k name" for some)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(ARGS)

.PHONY: build
build: $(STAMP) ## Build the notebooks from solutions/LAB/LAB.py (LAB=..., REPO_URL=..., PROSE=en)
	@$(BIN)/kvlab build --lab "$(LAB)" --repo-url "$(REPO_URL)" --language "$(PROSE)"

.PHONY: bench
bench: $(STAMP) ## Measure every solved notebook; CACHE=1: every cache (15 minutes); GRADING=1: a class of STUDENTS
	@$(if $(filter-out 0,$(GRADING)),PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/grading_bench.py --students $(STUDENTS),$(BIN)/kvlab bench --lab "$(LAB)" $(if $(filter-out 0,$(CACHE)),--cache))

.PHONY: capture
capture: $(STAMP) ## Make lab 03's file of real Keys and Values again (fetches the embedded model)
	@$(BIN)/kvlab capture

.PHONY: preflight
preflight: $(STAMP) ## Say whether this machine can run the paired experiment (PROFILE=...)
	@$(BIN)/kvlab preflight --profile "$(PROFILE)"

.PHONY: matrix
matrix: $(STAMP) ## Measure DynamicCache against QuantizedCache on the CPU (LABEL=..., FORCE=1)
	@$(BIN)/kvlab matrix run --mode embedded_cpu --label "$(LABEL)" $(if $(filter-out 0,$(FORCE)),--force)

.PHONY: matrix-gpu
matrix-gpu: $(STAMP) ## The same on an NVIDIA GPU (LABEL=..., MODEL=embedded without a hub)
	@$(BIN)/kvlab matrix run --mode real_gpu --label "$(LABEL)" --model "$(MODEL)" $(if $(filter-out 0,$(FORCE)),--force)

QUALITY_FILES = $(foreach file,$(FILES),$(if $(filter quality-%,$(notdir $(file))),$(file)))
MATRIX_FILES = $(filter-out $(QUALITY_FILES),$(FILES))
.PHONY: report
report: $(STAMP) ## Tables and figures of measured runs (FILES="results/a.json ...")
	@$(if $(FILES),,echo "no measured run in results/")
	@$(if $(MATRIX_FILES),$(BIN)/kvlab matrix report $(MATRIX_FILES))
	@$(if $(QUALITY_FILES),$(BIN)/kvlab quality report $(QUALITY_FILES))

.PHONY: quality
quality: $(STAMP) ## Quality against bytes of every cache, on the embedded model (LABEL=, QUICK=1, FORCE=1)
	@$(BIN)/kvlab quality run --label "$(LABEL)" $(if $(filter-out 0,$(QUICK)),--quick) $(if $(filter-out 0,$(FORCE)),--force)

.PHONY: pictures
pictures: $(STAMP) ## Take the README's pictures again (needs chromium)
	@mkdir -p .github/pictures
	@KVLAB_SCREENSHOTS=.github/pictures PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q tests/test_browser.py -k "rendered or scoreboard"

.PHONY: lint
lint: $(STAMP) ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: system
system: ## Install by apt what some tests need: bubblewrap and chromium
	@set -e; missing=; \
	command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	command -v chromium >/dev/null || missing="$$missing chromium fonts-dejavu-core"; \
	if [ -z "$$missing" ]; then echo "bubblewrap and chromium are there"; exit 0; fi; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	$$sudo apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install --quiet=2 --yes --no-install-recommends $$missing

.PHONY: clean
clean: ## Remove .venv and caches; notebooks, submissions and grades stay
	rm -rf $(VENV) .venv-bare .pytest_cache .mypy_cache .ruff_cache .hypothesis tools/kvlab.egg-info
