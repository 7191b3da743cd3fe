# Every target works from a fresh clone: it installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo up down bench peers migrate test chaos simulate models fuzz soak check format clients reference screenshots terraform docs docs-serve \
	build lock sbom clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Create .venv with everything in it (PYTHON=python3.12 chooses the interpreter)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Choose another one: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	@exec 9<$< && $(PYTHON) -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' && [ $@ -nt $< ] || { \
	  echo "Creating $(VENV) with $$($(PYTHON) --version) ..." && \
	  { $(PYTHON) -m venv $(VENV) || { \
	    echo "cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; } && \
	  echo "Installing Penstock and its tools (a minute or so) ..." && \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]' && touch $@; }

demo: setup ## Start everything, export DEMO_TASKS (5000) records through it, check and print a summary
	@$(BIN)/python -m examples.export.demo --tasks $${DEMO_TASKS:-5000}

up: setup ## Start everything on this machine in the background, with the example's worker
	@$(BIN)/penstock up --detach --app examples.export

down: setup ## Stop what `make up` started; the data in .penstock stays
	@$(BIN)/penstock down

bench: setup ## Measure: BENCH=drain (live, latency ... or all), PG=15, ARGS="--repeat 3 --pooler"; JSON goes to benchmarks/results
	@PG=$(PG) $(BIN)/python -m tests.postgres_versions
	@PG=$(PG) $(BIN)/python -m benchmarks $${BENCH:-drain} --json benchmarks/results/$${BENCH:-drain}$(PG:%=-%)$(findstring -pooler,$(ARGS)).json $(ARGS)

peers: setup ## Drain the same tasks by other queues too (ARGS="--tasks 2000 --repeat 3"), side by side
	@$(BIN)/python -m benchmarks.peers --json benchmarks/results/peers.json $(ARGS)

migrate: setup ## Bring the schema of PENSTOCK_DATABASE_URL up to date
	@$(BIN)/penstock migrate

test: setup ## Run the tests, JOBS (6) files at a time, on PostgreSQL PG (18) (ARGS="-k name -x" is passed on)
	@PG=$(PG) $(BIN)/python -m tests.postgres_versions
	@PG=$(PG) env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $${JOBS:-6} --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: setup ## Kill, freeze, disconnect and starve processes under load (ARGS="--scenario kills --seconds 10")
	@$(BIN)/python -m tests.chaos $(ARGS)

simulate: setup ## Simulate whole runs with faults, each one replayable by its SEED (SEEDS=240 STEPS=10 ARGS="--mutations")
	@$(BIN)/python -m tests.simulation --seed $${SEED:-0} --seeds $${SEEDS:-1} --steps $${STEPS:-25} $(ARGS)

models: setup ## Visit every state of the models in docs/models, and find each intended bug (ARGS="--bug 'no fence'" shows one)
	@$(BIN)/python -m docs.models $(ARGS)

fuzz: setup ## Look for inputs that TARGET=cron (json-rpc, mcp, inbound, results, clockwork, scheduler0, kafka) cannot cope with, for MINUTES=1
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -qq --disable-pip-version-check 'atheris>=3'
	@nice $(BIN)/python -m tests.fuzz $${TARGET:-cron} --minutes $${MINUTES:-1}

soak: setup ## Run a steady mix for HOURS=2 with a kill a minute; chart and figures go to benchmarks/results (ARGS="--hold-minutes 60")
	@$(BIN)/python -m tests.soak --hours $${HOURS:-2} $(ARGS)

check: setup ## Formatting, lint, types, import layers, wording, generated client, dependencies (known vulnerabilities too, if the advisory database is reachable)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/words.py
	@$(BIN)/python .ci/unasync.py --check
	@$(BIN)/python .ci/audit.py

format: setup ## Format the code and apply the linter's fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DOCS_INSTALLED) ## Build the documentation site into build/site; a warning, such as a broken link, fails the build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "build/site/index.html is the first page; make docs-serve rebuilds it at each change"

docs-serve: $(DOCS_INSTALLED) ## Serve the documentation site on http://127.0.0.1:8000, rebuilt at each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --config-file docs/site/mkdocs.yml

$(DOCS_INSTALLED): $(INSTALLED)
	@echo "Installing the tools of the documentation site ..."
	@$(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$@.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --requirement $@.txt
	@touch $@

build: setup ## Build the wheel and the source distribution into dist/
	@$(BIN)/python -m hatchling build

lock: setup ## Write .ci/image-requirements.txt, the pinned packages of the image, from pyproject.toml
	@$(BIN)/python -m pip install -qq --disable-pip-version-check uv
	@$(BIN)/uv pip compile -q pyproject.toml --extra server --extra encryption --extra kafka --extra rabbitmq --extra otel \
	  --python-version 3.12 --python-platform linux --generate-hashes --no-annotate --no-header --no-emit-index-url --upgrade \
	  -o .ci/image-requirements.txt
	@sed -i '1i # What the image installs, with hashes: `make lock` writes it from pyproject.toml.' .ci/image-requirements.txt

sbom: setup ## Write a software bill of materials (CycloneDX) into dist/
	@$(BIN)/python .ci/sbom.py dist/penstock.cdx.json

clients: setup ## Generate the blocking client from the asyncio one
	@$(BIN)/python .ci/unasync.py

reference: setup ## Generate docs/cli.md, docs/methods.md, docs/openrpc.json and docs/python-reference.md from the code, llms.txt from the pages
	@$(BIN)/python -m docs.generate_methods
	@$(BIN)/python -m docs.generate_cli
	@$(BIN)/python -m docs.generate_python
	@$(BIN)/python -m docs.site.pages

screenshots: setup ## Take screenshots of the dashboard into docs/images (needs chromium and chromium-driver)
	@$(BIN)/python -m tests.dashboard.screenshots

terraform: setup ## Check terraform/ and the examples, by terraform if it is installed; says what was left out
	@$(BIN)/python -m tests.terraform

clean: ## Remove .venv, caches and builds; data in .penstock stays
	@rm -rf $(VENV) .venv-django .bench-peers .postgres build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
