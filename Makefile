# Every verb works from a clean clone with Python, g++ and make: the environment is made once, in .venv, and reused.
PYTHON ?= python3
SANITIZE ?= address,undefined
# Processes that run the tests, each of them whole files: most tests keep one core busy.
JOBS ?= 2

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
CPP := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
STYLED := $(CPP) $(wildcard tests/cuda/*.h tests/cuda/*.cpp tests/cuda/*.cu)
# What the sanitizer's own library is called: it must be loaded before Python.
SANITIZER := $(if $(findstring thread,$(SANITIZE)),libtsan.so,libasan.so)

.PHONY: help build test check bench demo lint format clean sanitize

help:  ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

build: build/extension.stamp  ## make .venv, install pydml into it and compile the extension

test: build .venv/cuda.stamp  ## run the whole test suite, slow tests included
	@$(PY) -m pytest -n $(JOBS) --dist loadfile

# What a change most often breaks, without compilers, ranks, trainings and sweeps over every regime.
check: build  ## run the fast part of the tests
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow" tests/engines/test_declared.py \
		tests/engines/test_policies.py tests/losses/test_golden.py tests/losses/test_degenerate.py tests/cpu \
		tests/memory tests/metrics tests/mining/test_miners.py tests/package

bench: build  ## run the benchmarks
	@$(PY) -m bench

demo: build  ## run the demo
	@$(PY) -m pydml.demo

lint: .venv/tools.stamp  ## check style and types
	@echo "lint: ruff, mypy, clang-format"
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy --strict pydml
	@.venv/bin/clang-format --dry-run --Werror $(STYLED)

format: .venv/tools.stamp  ## rewrite the sources in the house style
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format
	@.venv/bin/clang-format -i $(STYLED)

clean:  ## remove what was built, except .venv
	@rm -rf build dist *.egg-info pydml/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The tests run on a copy of the package beside the instrumented extension, so that the usual one stays as it is; -s,
# because a sanitizer ends the process and its report would end with pytest's capture. libstdc++ is loaded beside the
# sanitizer, which else does not find what throws exceptions.
sanitize: .venv/install.stamp  ## run the tests marked sanitize on an instrumented extension
	@echo "sanitize: building with -fsanitize=$(SANITIZE)"
	@rm -rf build/sanitize/lib
	@PYDML_SANITIZE=$(SANITIZE) PYDML_REQUIRE_EXT=1 $(PY) setup.py -q build \
		--build-base build/sanitize --build-lib build/sanitize/lib
	@cp -r tests pyproject.toml $(wildcard conftest.py) build/sanitize/lib
	@cd build/sanitize/lib && PYDML_SANITIZE=$(SANITIZE) ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=$(SANITIZER)) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(CURDIR)/$(PY) -m pytest -s -m sanitize tests

# torch comes first, by its pinned version, so that nothing else chooses one.
.venv/tools.stamp: requirements/dev.txt requirements/constraints.txt
	@test -x $(PY) || { echo "venv: creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "venv: installing torch"
	@$(PIP) install -c requirements/constraints.txt torch==2.13.0
	@echo "venv: installing the tools"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

# The toolkit that the tests compile the CUDA kernels with; no GPU is needed.
.venv/cuda.stamp: .venv/tools.stamp requirements/cuda.txt
	@echo "venv: installing a CUDA toolkit"
	@$(PIP) install --no-deps -r requirements/cuda.txt
	@touch $@

# Installed without the extension: the next rule compiles it, and recompiles only the files that changed.
.venv/install.stamp: .venv/tools.stamp setup.py pyproject.toml
	@echo "venv: installing pydml"
	@PYDML_NO_EXT=1 $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

build/extension.stamp: .venv/install.stamp setup.py $(CPP)
	@echo "build: compiling the C++ extension"
	@mkdir -p build
	@PYDML_REQUIRE_EXT=1 $(PY) setup.py -q build_ext --inplace >build/extension.log 2>&1 \
		|| { cat build/extension.log; exit 1; }
	@touch $@
