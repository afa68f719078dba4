# `make demo` and `make test` do everything on a bare machine: environment, dependencies, native build, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ONLY_PORTABLE := ON

.PHONY: setup demo test test-native test-bench test-journeys-smoke test-slice test-examples test-all lint format docs figures wheel wheel-check native-test native-sanitize native-tsan native-kernels native-aarch64 clean

setup: $(STAMP)

# torch comes first, as constraints.txt pins it: what is installed later then keeps it. An editable install knows packages by their paths, so
# it is made anew where one came.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(shell find src -name __init__.py) $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt 2>/dev/null)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.24" "ninja>=1.11"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -C build-dir=build/native -e ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/colonnade demo

# Threads that spin while they wait would keep the tests' other processes from the processor: half the time. Bytecode is written
# even where the environment says not to: workers and a hundred processes import the same files.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive $(BIN)/python -m pytest

# Everything in Python that is not marked slow, but the tests of benches, and journeys. A file stays on one worker, which makes its fixtures once.
test: setup
	$(PYTEST) -m "not slow" --ignore tests/journeys -n 2 --dist loadfile --durations 40

# The core without Python: plain and under sanitizers.
test-native: native-test native-sanitize

# What benches compute, not how fast anything is.
test-bench: setup
	$(PYTEST) -m "not slow" -n 2 tests/bench

# Journeys that every landing runs: what a user types, on real processes.
test-journeys-smoke: setup
	$(PYTEST) tests/journeys -m smoke

# What no target above runs, in slices of at most 15 minutes: the one that was green longest ago, or `make test-slice SLICE=NAME`. A green
# run is recorded in tests/slices.json; `make test` fails once one is 12 days old.
test-slice: setup
	env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive $(BIN)/python tests/slices.py $(SLICE)

# Property tests with many examples.
test-examples: setup
	$(PYTEST) -m "not slow" -n 2 --hypothesis-profile thorough $$(grep -rl --include="*.py" "example_counts import" tests)

# All of these, what is slow, the thread sanitizer, and the core for another processor.
test-all: ONLY_PORTABLE := OFF
test-all: test-native native-tsan native-aarch64
	$(PYTEST) tests --hypothesis-profile thorough

# In the folder of the extension's own build: the core is compiled already.
native-test: setup
	$(BIN)/cmake --build build/native --target native_tests
	$(BIN)/ctest --test-dir build/native --output-on-failure

# Of the kernels, which are one source, one compilation; `make test-all` has all three.
native-sanitize: setup
	$(BIN)/cmake -S . -B build/sanitize -DCOLONNADE_ONLY_PORTABLE=$(ONLY_PORTABLE) -G Ninja -DCOLONNADE_PYTHON=OFF -DCOLONNADE_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1" -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > /dev/null
	$(BIN)/cmake --build build/sanitize --target native_tests
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

# All kernels under sanitizers, and the core for another processor.
native-kernels: ONLY_PORTABLE := OFF
native-kernels: native-sanitize native-aarch64

# The tests that bring their own threads.
native-tsan: setup
	$(BIN)/cmake -S . -B build/tsan -G Ninja -DCOLONNADE_PYTHON=OFF -DCOLONNADE_SANITIZE=thread -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1" -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > /dev/null
	$(BIN)/cmake --build build/tsan --target threads_test log_test tiered_test
	$(BIN)/ctest --test-dir build/tsan --output-on-failure -R '^(threads|log|tiered)$$'

# The core for another processor: compiled, and its tests run where an emulator is there; fuzzing is left to real processors.
CROSS := aarch64-linux-gnu
native-aarch64: setup
	@if command -v $(CROSS)-g++ > /dev/null; then \
	  $(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCOLONNADE_PYTHON=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=$(CROSS)-gcc -DCMAKE_CXX_COMPILER=$(CROSS)-g++ \
	    "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/$(CROSS)" > /dev/null && \
	  $(BIN)/cmake --build build/aarch64 --target native_tests && \
	  if command -v qemu-aarch64-static > /dev/null; then $(BIN)/ctest --test-dir build/aarch64 --output-on-failure -E fuzz; \
	  else echo "aarch64: built, not run: there is no qemu-aarch64-static"; fi; \
	else echo "aarch64: skipped, there is no $(CROSS)-g++ (Debian: g++-aarch64-linux-gnu and qemu-user-static)"; fi

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict recipes

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site into build/docs: docs/*.md and the API reference; a broken link is an error. Open build/docs/index.html.
docs: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# The figures of README.md and docs/results.md, from bench/results; and docs/tree.md, from the files it lists.
figures: setup
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/tree.py

# A wheel for this Python into dist/; CI services build the others with cibuildwheel (pyproject.toml).
wheel: setup
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist

# As its user gets it: the wheel in an empty environment, away from the sources, and the tutorial there.
wheel-check: wheel
	rm -rf build/wheel-env && $(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -r constraints.txt
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt dist/*.whl pytest
	build/wheel-env/bin/python -m pytest -q --rootdir tests/unit --noconftest -p no:cacheprovider -o addopts= -o pythonpath=tests -o timeout= -k tutorial tests/unit/test_pages.py

clean:
	rm -rf build dist $(VENV) src/*.egg-info
