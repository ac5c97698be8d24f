# Two commands: `make lab` and `make test`. Both build .venv first if it is missing or out of date.
#   make lab HARDWARE=cpu     the CPU stack, whatever the machine has (cpu, gpu; default: auto)
#   make lab PORT=9000        that port and no other (default: the first free one from 8888)
#   make lab PYTHON=python3.12    the Python that .venv is made from

PYTHON ?= python3
HARDWARE ?= auto
PORT ?=
BIN := .venv/bin
# For what a notebook or a terminal starts in turn: python, torchrun, vllm. Not exported, for PYTHON is looked up too.
IN_VENV = env PATH="$(CURDIR)/.venv/bin:$$PATH"
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
NOTEBOOKS := $(wildcard notebooks/*.ipynb notebooks/solutions/*.ipynb)

# The kernel named python3 is that of .venv, whatever else the user has installed.
export JUPYTER_PREFER_ENV_PATH := 1
# Set by a shell or a CI, it would keep figures out of notebooks.
unexport MPLBACKEND

.PHONY: help venv deepspeed lab test test-gpu lint notebooks site port
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n "s/^\([a-z-]*\):.*## /\1@/p" $(firstword $(MAKEFILE_LIST)) | awk -F @ '{printf "make %-10s %s\n", $$1, $$2}'

venv: ## build .venv, or bring it up to date, for the hardware of this machine
	@command -v "$(PYTHON)" >/dev/null || { echo "make: there is no $(PYTHON) here; install Python 3.11 to 3.14, or name one: make lab PYTHON=/path/to/python3.12" >&2; exit 2; }
	@"$(PYTHON)" deploy/install.py --venv .venv --hardware "$(HARDWARE)"

deepspeed: venv ## add DeepSpeed for notebook 07, in .venv-deepspeed; .venv stays as it is
	@$(BIN)/python deploy/install_deepspeed.py

port:
	@case "$(PORT)" in \
	  '') ;; \
	  *[!0-9]*|??????*) false ;; \
	  *) [ "$(PORT)" -ge 1024 ] && [ "$(PORT)" -le 65535 ] ;; \
	esac || { echo "make: PORT=$(PORT) must be a number from 1024 to 65535; for example PORT=8888" >&2; exit 2; }

lab: port venv ## open JupyterLab on the notebooks (this machine only, token on)
	@set -- --ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)/notebooks"; \
	if [ -n "$(PORT)" ]; then set -- "$$@" --port="$(PORT)" --ServerApp.port_retries=0; fi; \
	if [ "$$(id -u)" = 0 ]; then set -- "$$@" --allow-root; fi; \
	if [ "$$(uname)" != Darwin ] && [ -z "$$DISPLAY$$WAYLAND_DISPLAY" ]; then \
	  echo "lab: no display here, so no browser is opened; open the address with the token, printed below"; \
	  set -- "$$@" --no-browser; \
	fi; \
	exec $(IN_VENV) python -m jupyterlab "$$@"

test: venv ## run every check: lint, unit tests, notebooks under nbval
	@failed=; \
	{ $(LINT); } || failed="$$failed lint"; \
	$(IN_VENV) python -m pytest tests --ignore tests/gpu || failed="$$failed tests"; \
	$(IN_VENV) python -m pytest --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg \
	  --nbval-cell-timeout 120 notebooks || failed="$$failed notebooks"; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed" >&2; exit 1; fi; \
	echo "make test: lint, tests and notebooks passed"

test-gpu: venv ## run the GPU suite on the GPUs of this machine, and keep what it measures in recorded/
	@$(IN_VENV) python -m pytest tests/gpu --durations 5 --session-timeout 720

lint: venv ## ruff (rules and format, notebooks too) and a strict type check of labsupport
	$(LINT)

notebooks: venv ## execute every notebook again and save its outputs
	$(IN_VENV) python deploy/execute.py $(NOTEBOOKS)

site: venv ## export every notebook to HTML in site/
	$(BIN)/python -m nbconvert --to html --output-dir site notebooks/*.ipynb
