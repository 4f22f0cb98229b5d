# make quickstart    build kernels/rmsnorm, publish it to a local Hub, load it from there, check it, time it
# make check         lint, types and unit tests, in at most 90 s: before each push
# make test          the whole test suite: lint, types, documentation, tests; it ends with the list of skipped tests
# make unit          the unit tests alone
# make lint          format, lint, types, import contracts, declared dependencies
# make update        take new releases of Torch and clients from the package index into the builder's tables
# make docs          build the documentation in site/ and check every link
# make packages      build the CPU packages of kernels/, which the tests load
# make arm64-python  a Python for aarch64 in .venv/arm64, which runs by qemu-user: a nightly test needs it (Debian, Ubuntu)
# make gpu-test      the kernels' tests, on a machine with a GPU; CUDA_COMPILER=clang tests clang's binaries
# make landlock-test the tests that depend on the sandbox, on Landlock where bubblewrap is installed as well
# make nightly       attack the Hub server, fuzz parsers, kill servers, builds and uploads, compile Triton kernels (30 minutes)
# make newest-client the tests that depend on the Hub's client, with its newest release
# make device-code   compile all device code with nvcc and clang, warnings as errors, and for ROCm (minutes)
#
# All set themselves up in .venv. TORCH selects the Torch to test with (make test TORCH=torch==2.14.1), JOBS the number of
# tests that run at a time, and PYTEST more options for pytest.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 0
KERNELS = $(patsubst %/build.toml,%,$(wildcard kernels/*/build.toml))

# Python writes bytecode on import: pip would compile every file of every package, which takes a minute.
export PYTHONDONTWRITEBYTECODE =
# Bytecode without columns loads faster: the tests import Torch some 300 times.
export PYTHONNODEBUGRANGES = 1

.PHONY: quickstart update check unit test all-tests bytecode newest-client packages arm64-python gpu-test landlock-test device-code nightly lint docs clean

# The directories of the distributions.
PACKAGES = . $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))

# uv needs a third of pip's time; Torch is installed by pip, whose settings name its index.
.venv/ready: $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --upgrade pip uv "$(TORCH)"
	.venv/bin/uv pip install --quiet --python .venv $(PACKAGES:%=--editable ./%) --group test --group docs "$(TORCH)"
	touch $@

update: .venv/ready
	.venv/bin/kernel-builder toolchain update
	.venv/bin/python nix/lock_python.py --if-newer kernels huggingface_hub

quickstart: .venv/ready
	.venv/bin/python benchmarks/quickstart.py

# mypy, with two processes, takes most of the time of lint.
check: .venv/ready
	$(MAKE) --jobs=2 --output-sync=target lint unit

unit: .venv/ready
	.venv/bin/python -m pytest -p tests.skips tests/unit -n 2 --dist loadfile $(PYTEST)

# Idle threads of Torch sleep: several tests share the processors, and spinning multiplies the time of small operations.
test: export OMP_WAIT_POLICY = passive
# NumPy would start threads on import, which takes 0.1 s of CPU time, and Torch imports NumPy.
test: export OPENBLAS_NUM_THREADS = 1
# The pytest processes that tests start would import all plugins, which takes a second.
test: export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
# Tests and the build of packages often wait for processes, so lint and the documentation are checked meanwhile.
test: .venv/ready
	$(MAKE) --jobs=3 lint docs all-tests

all-tests: .venv/ready packages
	.venv/bin/python -m pytest -p xdist -p pytest_timeout -p tests.skips --ignore=tests/nightly tests packages $(KERNELS:%=%/tests) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# Otherwise each of several test processes compiles the same tests and imports. Tests of kernels that are not built fail.
bytecode: export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
bytecode: .venv/ready
	.venv/bin/python -m pytest -p pytest_timeout --collect-only -qq --ignore=tests/nightly tests packages $(KERNELS:%=%/tests) >/dev/null 2>&1 || true

packages: .venv/ready
	.venv/bin/kernel-builder build $(KERNELS) --backend cpu

# Without qemu-user or Debian's tools it prints a notice and creates no file.
arm64-python: .venv/ready
	.venv/bin/python -m tests.support.emulated_python .venv/arm64

gpu-test: .venv/ready
	.venv/bin/kernel-builder build $(KERNELS) $(wildcard kernels/*/naive) --backend cuda $(CUDA_COMPILER:%=--cuda-compiler %)
	.venv/bin/python -m pytest -p tests.skips tests/unit/measure $(KERNELS:%=%/tests) $(PYTEST)

# A bubblewrap that does not work, as in some containers, comes first.
landlock-test: .venv/ready
	mkdir -p .venv/without-bubblewrap
	printf '#!/bin/sh\nexit 1\n' > .venv/without-bubblewrap/bwrap
	chmod +x .venv/without-bubblewrap/bwrap
	PATH="$(CURDIR)/.venv/without-bubblewrap:$$PATH" .venv/bin/python -m pytest -p tests.skips -m sandbox \
		tests/integration/steps/test_confinement.py tests/integration/build_command/test_bad_projects.py \
		-n $(JOBS) --dist loadfile $(PYTEST)

device-code: .venv/ready
	.venv/bin/python -m pytest -m device_code tests/integration/build_command/test_device_code.py \
		tests/integration/build_command/test_rocm.py $(PYTEST)

newest-client: .venv/ready
	.venv/bin/uv pip install --quiet --python .venv --upgrade kernels kernels-data
	.venv/bin/python -m pytest -p tests.skips -n 2 packages/kernel-hub/tests/test_server_clients.py tests/unit/package tests/unit/hub tests/integration/checks tests/system/hub/publishing $(PYTEST)

# The builds fetch Triton and CuTe DSL, without which tests are skipped.
nightly: .venv/ready arm64-python packages
	.venv/bin/uv pip install --quiet --python .venv atheris
	for project in triton/moe_routing cute-dsl/row_norm; do \
		.venv/bin/kernel-builder build examples/$$project --capability 9.0 --no-load \
			--variant torch-stable-abi210-cu130-x86_64-linux --out .venv/$$project || exit 1; done
	.venv/bin/python -m pytest -m nightly tests packages $(KERNELS:%=%/tests) $(PYTEST)
	.venv/bin/python -m pytest tests/integration/test_aot.py tests/integration/test_cute_dsl.py $(PYTEST)

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	for package in $(PACKAGES); do (cd $$package && $(CURDIR)/.venv/bin/deptry --no-ansi kernel_*) || exit 1; done
	.venv/bin/lint-imports
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs .venv/bin/clang-format --dry-run --Werror

# --quiet would hide from --strict the warnings that it fails on.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf .venv site kernels/*/build
