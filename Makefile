# Start with `make demo`. Every target installs what it needs.
#
# Needs: Python 3.11 or later, a C compiler (for the Redis that the tests start), and a package index.
# The viewer's tests need Chromium, or they are skipped: tests/api/viewer/install_chromium.sh installs Debian's (as root).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demo needs a third of the packages, and a tenth of their bytes.
DEMO_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
VLLM_VENV ?= .venv-vllm
MINISWE_VENV ?= .venv-miniswe
NEMO_GYM_VENV ?= .venv-nemo-gym
TRAINERS_VENV ?= .venv-trainers
AGENTS_VENV ?= .venv-agents
TRACKERS_VENV ?= .venv-trackers
REPLAY_VENV ?= .venv-replay
TRL_VENV ?= .venv-trl
DYNAMO_VENV ?= .venv-dynamo
HARNESS_DIR ?= .harnesses
VLLM_VERSIONS ?= 0.24 0.25
CONSUMERS := verl==0.9.1 skyrl==0.3.0 trl==1.16.0 miles-rl==0.0.2
USUAL := claude-code codex hermes opencode openclaw openai-agents langgraph crewai
# Twice as many as two cores: tests wait for each other's servers. A worker that has nothing left to do takes tests from another one.
JOBS ?= 4
# Each worker runs an engine, with some 4 GB of memory; tests of one engine run in one worker, so that it starts once. Three
# keep two cores busy: a test often waits for its harness.
E2E_JOBS ?= 3
# Folders of which all tests run, not only those that CONTRIBUTING.md calls the usual ones: WHOLE=tests/core,tests/proxy
WHOLE ?=
PYTEST = $(BIN)/pytest --numprocesses $(JOBS) --maxprocesses 8 --dist worksteal --whole "$(WHOLE)"
# Not those that count every step of an expression or a function: a quarter of the time.
FAST_TESTS := tests/core tests/dialects tests/testing tests/trajectories/formats --ignore=tests/core/test_linear_work.py
E2E = TOKENCACHE_E2E_VLLM=$(abspath $(VLLM_VENV)) TOKENCACHE_E2E_MINISWE=$(abspath $(MINISWE_VENV)) \
	TOKENCACHE_E2E_HARNESS_DIR=$(abspath $(HARNESS_DIR)) TOKENCACHE_E2E_NEMO_GYM=$(abspath $(NEMO_GYM_VENV)) \
	TOKENCACHE_E2E_TRL=$(abspath $(TRL_VENV)) TOKENCACHE_E2E_DYNAMO=$(abspath $(DYNAMO_VENV))
# an engine may take minutes to start on a busy machine
E2E_OPTIONS = -o addopts="-q --strict-markers --strict-config" -o faulthandler_timeout=1900 -o run_limit=5000
PYTEST_E2E = $(BIN)/pytest $(E2E_OPTIONS)
# the frameworks' own warnings are not errors here
INTEGRATION_OPTIONS = $(E2E_OPTIONS) -o filterwarnings=
# runs these tests again, in an environment with NeMo Gym, to compare with its own classes
NEMO_GYM_TESTS = $(NEMO_GYM_VENV)/bin/python -m pytest $(E2E_OPTIONS) tests/system/nemo tests/trajectories/formats/test_nemo_gym.py

# Tests start many processes: Python keeps what it compiled, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install lock audit release demo notebook docs lint lint-deploy check test test-all fast-tests usual-tests coverage e2e e2e-install e2e-engine e2e-nemo e2e-harnesses e2e-versions consumers integrations chaos fuzz adversary bench bench-quick bench-engine bench-others clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## install the package (editable) and its tools into .venv

# Makes an environment with uv, which downloads in parallel and keeps what it has downloaded.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, this is {sys.version}")'
@echo "installing into $(@D): half a minute the first time"
$(PYTHON) -m venv $(@D)
$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps "uv==$$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements.lock)"
endef

$(STAMP): pyproject.toml vllm_plugin/pyproject.toml requirements.lock
	$(environment)
	@# --no-deps: the lock is complete
	$(BIN)/uv pip install --python $(BIN)/python -q --no-deps --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python -q --no-deps --no-build-isolation -e . -e vllm_plugin
	@touch $@

lock: ## update requirements.lock after a change of pyproject.toml; ARGS=--upgrade uses the newest releases
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --disable-pip-version-check install -q uv; }
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--output-file requirements.lock --quiet $(ARGS)

audit: $(STAMP) ## check requirements.lock for known vulnerabilities; RESULT=FILE writes the result into a file, too
	$(BIN)/python .ci/audit.py requirements.lock $(if $(RESULT),--result $(RESULT))

release: $(STAMP) ## build wheels and source distributions into dist/, and use them in an empty environment
	$(BIN)/python .ci/release.py dist

.venv-demo/.installed: pyproject.toml requirements.lock
	$(environment)
	.venv-demo/bin/uv pip install --python .venv-demo/bin/python -q --constraint requirements.lock -e '.[testing]'
	@touch $@

demo: $(DEMO_VENV)/.installed ## run one agent directly and through the proxy, on a simulated engine: seconds, no GPU
	@$(DEMO_VENV)/bin/tokencache demo $(ARGS)

.venv-notebook/.installed: pyproject.toml requirements.lock
	$(environment)
	.venv-notebook/bin/uv pip install --python .venv-notebook/bin/python -q --constraint requirements.lock -e '.[plot,testing]' nbconvert ipykernel
	@touch $@

notebook: .venv-notebook/.installed ## run examples/notebook, which plots what text loses; half a minute
	PATH="$(abspath .venv-notebook/bin):$$PATH" .venv-notebook/bin/jupyter nbconvert --to notebook --execute --inplace examples/notebook/exact_tokens.ipynb

lint: docs ## run ruff, its formatter, mypy, the import contracts, and the checks of the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docs.lint

docs: $(STAMP) ## build the documentation site into site/; a broken link fails the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint-deploy: $(STAMP) ## check the Dockerfile, the compose file and the manifests
	$(BIN)/hadolint Dockerfile
	TOKENCACHE_ADMIN_KEY=none $(BIN)/docker-compose --profile '*' config --quiet
	TOKENCACHE_ADMIN_KEY=none $(BIN)/docker-compose --file docker-compose.yml --file deploy/dynamo/compose.yaml config --quiet
	$(BIN)/yamllint --strict -d '{extends: relaxed, rules: {line-length: disable}, ignore: deploy/chart/templates}' docker-compose.yml deploy
	$(BIN)/helm lint --strict --quiet deploy/chart
	$(BIN)/helm template tokencache deploy/chart | $(BIN)/kubernetes-validate --strict --quiet -
	$(BIN)/kubernetes-validate --strict --quiet $(filter-out %/kustomization.yaml,$(wildcard deploy/kubernetes/*/*.yaml))

check: $(STAMP) ## run lint, types and the fast tests: half a minute, after every edit
	$(MAKE) --jobs=2 JOBS=2 lint fast-tests

test: $(STAMP) ## run lint, types, and the usual tests, in parallel; JOBS=0 disables that, COVERAGE=1 measures coverage
	$(MAKE) --jobs=2 lint lint-deploy usual-tests

test-all: ## run `make test` with all tests: also those that repeat a kind in another combination
	$(MAKE) test WHOLE=tests

coverage: ## run `make test COVERAGE=1`, which fails below the level in pyproject.toml
	$(MAKE) test COVERAGE=1

fast-tests: $(STAMP)
	$(PYTEST) $(FAST_TESTS)

# pytest compiles each file of tests at its first use: once here, and not in each worker at the same time
$(VENV)/.compiled: $(STAMP)
	@$(BIN)/pytest --collect-only --numprocesses 0 >/dev/null || true
	@touch $@

usual-tests: $(VENV)/.compiled
	$(PYTEST) --figures $(if $(COVERAGE),--cov=tokencache)

e2e: e2e-install ## run the end-to-end tests: a real vLLM on CPU, Claude Code, Codex, OpenClaw and more; 15 minutes, 8 GB the first time
	$(E2E) TOKENCACHE_E2E_HARNESSES="$(USUAL) mini-swe-agent" $(PYTEST_E2E) \
		--numprocesses $(E2E_JOBS) --dist loadscope --no-loadscope-reorder --figures --whole "$(WHOLE)" tests/system/e2e
	$(NEMO_GYM_TESTS)
	$(MAKE) consumers integrations

consumers: $(STAMP) ## test the export formats with the trainers' own classes (their wheels, without dependencies; slime and prime-rl: a checkout)
	mkdir -p .consumers
	for w in $(CONSUMERS); do f=$${w%%==*}; ls .consumers/$$(echo $$f | tr - _)-$${w##*==}-*.whl >/dev/null 2>&1 || \
		$(BIN)/python -m pip --disable-pip-version-check download -q --no-deps --dest .consumers $$w || exit 1; done
	TOKENCACHE_CONSUMERS=$(abspath .consumers) $(PYTEST_E2E) tests/trajectories/formats/test_published.py

integrations: e2e-engine ## test tokencache.integrations inside verl, SkyRL, verifiers, Harbor, OpenEnv and experiment trackers, and traces in Dynamo's simulator and aiperf: four minutes; 2 GB beside what `make e2e` installs
	PYTHON=$(PYTHON) tests/integrations/install.sh $(VLLM_VENV) $(TRAINERS_VENV) $(AGENTS_VENV) $(TRACKERS_VENV) $(REPLAY_VENV)
	$(TRAINERS_VENV)/bin/python -m pytest $(INTEGRATION_OPTIONS) tests/integrations/test_verl.py tests/integrations/test_skyrl.py
	TOKENCACHE_CONSUMERS=$(wildcard $(abspath .consumers)) $(AGENTS_VENV)/bin/python -m pytest $(INTEGRATION_OPTIONS) \
		tests/integrations/test_verifiers.py tests/integrations/test_harbor.py \
		$(addprefix tests/trajectories/formats/test_,verifiers.py atif.py published.py)
	$(TRACKERS_VENV)/bin/python -m pytest $(INTEGRATION_OPTIONS) tests/integrations/test_trackers.py
	$(REPLAY_VENV)/bin/python -m pytest $(INTEGRATION_OPTIONS) tests/integrations/test_traces.py
	$(TRL_VENV)/bin/python -m pytest $(INTEGRATION_OPTIONS) tests/integrations/test_openenv.py

e2e-harnesses: e2e-engine ## test every real harness that can be installed; writes docs/harnesses.md
	-tests/system/e2e/harnesses/install.sh $(HARNESS_DIR)
	$(E2E) TOKENCACHE_E2E_WRITE_TABLE=1 $(PYTEST_E2E) tests/system/e2e/harnesses

e2e-versions: $(STAMP) ## test older vLLMs with and without the plugin, VLLM_VERSIONS="0.24 0.25"; writes the table in docs/engines.md
	for v in $(VLLM_VERSIONS); do PYTHON=$(PYTHON) tests/system/e2e_versions/install.sh .venv-vllm-$$v "$$v.*" || exit 1; done
	TOKENCACHE_E2E_VLLMS="$(VLLM_VERSIONS:%=.venv-vllm-%)" TOKENCACHE_E2E_WRITE_TABLE=1 $(PYTEST_E2E) tests/system/e2e_versions

e2e-nemo: $(STAMP) ## test NVIDIA's nemo-gym with the proxy in each position, on a real vLLM: three minutes
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_vllm.sh $(VLLM_VENV)
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_nemo_gym.sh $(NEMO_GYM_VENV)
	$(E2E) $(PYTEST_E2E) tests/system/e2e/test_nemo_gym.py tests/system/e2e/test_nemo_gym_capture.py tests/system/e2e/test_switchyard.py
	$(NEMO_GYM_TESTS)

e2e-install: e2e-engine ## install what `make e2e` needs (`make e2e` does so, too)
	tests/system/e2e/harnesses/install.sh $(HARNESS_DIR) $(USUAL) gemini-cli
	PYTHON=$(PYTHON) tests/integrations/install.sh $(VLLM_VENV) $(TRAINERS_VENV) $(AGENTS_VENV) $(TRACKERS_VENV) $(REPLAY_VENV)

e2e-engine: $(STAMP)
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_vllm.sh $(VLLM_VENV)
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_torchvision.sh $(VLLM_VENV)/torchvision
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_miniswe.sh $(MINISWE_VENV)
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_nemo_gym.sh $(NEMO_GYM_VENV)
	tests/system/e2e/rig/install_trl.sh $(TRL_VENV) $(VLLM_VENV) $(VENV)
	tests/system/e2e/rig/install_dynamo.sh $(DYNAMO_VENV) $(VLLM_VENV)

chaos: $(STAMP) ## run 2,000 turns while proxies, Redis and engines are killed, frozen and cut off: some minutes. ARGS="--turns N --seed S"
	$(BIN)/python -m tests.system.faults.chaos $(ARGS)

fuzz: $(STAMP) ## fuzz the parsers of untrusted input for two minutes; guided by coverage if atheris is in .venv. ARGS="path --seconds 600"
	$(BIN)/python -m tests.system.fuzz $(ARGS)

adversary: $(STAMP) ## test parsing, matching, planning and recording with random agent sessions. ARGS="--turns 1000000 --processes 2"
	$(BIN)/python -m tests.system.adversary $(ARGS)

bench: bench-others ## measure what the proxy costs, next to a bare relay, nginx, LiteLLM and more: 25 minutes, on an idle machine
	$(BIN)/python -m bench $(ARGS)

bench-quick: bench-others ## run a part of the bench in under two minutes
	$(BIN)/python -m bench --quick $(ARGS)

bench-engine: bench-others ## measure the engine's gain: first token, prefix cache, calls a second of a real vLLM on CPU, with and without the proxy: half an hour
	PYTHON=$(PYTHON) tests/system/e2e/rig/install_vllm.sh $(VLLM_VENV)
	TOKENCACHE_E2E_VLLM=$(abspath $(VLLM_VENV)) $(BIN)/python -m bench.gain $(ARGS)
	TOKENCACHE_E2E_VLLM=$(abspath $(VLLM_VENV)) $(BIN)/python -m bench.gain_load $(filter --quick,$(ARGS))

bench-others: $(STAMP)
	PYTHON=$(PYTHON) bench/install_others.sh .bench-venvs

clean: ## remove .venv, .venv-demo, caches and builds (keeps .venv-vllm*, the other .venv-*, .bench-venvs and .harnesses: gigabytes)
	rm -rf $(VENV) .venv-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist site bench/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
