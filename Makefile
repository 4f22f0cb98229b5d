# make quickstart   build kernels/rmsnorm, load it, check it, time it
# make test         the whole test suite: lint, types, documentation, tests
# make lint         format, lint, types, declared dependencies; what pre-commit runs
# make docs         the documentation as a site in site/, with every link checked
#
# All set themselves up in .venv. TORCH chooses the Torch to test with, e.g. make test TORCH=torch==2.14.1; with JOBS=2
# two tests run at a time.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 0
KERNELS = $(patsubst %/build.toml,%,$(wildcard kernels/*/build.toml))

.PHONY: quickstart test lint docs clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable ".[hub]" --group test --group docs "$(TORCH)"
	touch $@

quickstart: .venv/ready
	.venv/bin/python benchmarks/quickstart.py

test: .venv/ready lint docs
	.venv/bin/python -m pytest tests -n $(JOBS) --dist loadfile
	.venv/bin/kernel-builder build $(KERNELS) --backend cpu
	set -e; for kernel in $(KERNELS); do .venv/bin/python -m pytest $$kernel/tests -n $(JOBS); done

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/deptry --no-ansi kernel_builder
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs .venv/bin/clang-format --dry-run --Werror

# --quiet would hide from --strict the warnings that it fails on.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf .venv site kernels/*/build
