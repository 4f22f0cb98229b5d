# make quickstart   build kernels/rmsnorm, load it, check it, time it
# make test         the whole test suite: lint, types, tests
#
# Both set themselves up in .venv. TORCH chooses the Torch to test with, e.g. make test TORCH=torch==2.14.1; with JOBS=2
# two tests run at a time.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 0
KERNELS = $(patsubst %/build.toml,%,$(wildcard kernels/*/build.toml))

.PHONY: quickstart test lint clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable ".[hub]" --group test "$(TORCH)"
	touch $@

quickstart: .venv/ready
	.venv/bin/python benchmarks/quickstart.py

test: .venv/ready lint
	.venv/bin/python -m pytest tests -n $(JOBS) --dist loadfile
	.venv/bin/kernel-builder build $(KERNELS) --backend cpu
	set -e; for kernel in $(KERNELS); do .venv/bin/python -m pytest $$kernel/tests -n $(JOBS); done

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs .venv/bin/clang-format --dry-run --Werror

clean:
	rm -rf .venv kernels/*/build
