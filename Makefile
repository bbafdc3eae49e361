# The two commands of the README are `make demo` and `make test`. Each sets itself up
# in .venv; what is needed is Python 3.11-3.13, a C++17 compiler and GNU make.
#
#   make demo                         train the example, plots in out/demo
#   make test                         the Python tests on the newest jax
#   make test JAX=0.10.2              on that jax, in a virtual environment of its own
#   make test TESTS=tests/psum_test.py ARGS=-x      some tests, arguments for pytest
#   make cpp-test [SANITIZE=thread|address]
#   make cuda                         compile the CUDA sources (needs nvcc, no GPU); on a GPU
#                                     machine, out/cuda13/*_cuda_test then test the kernels
#   make bazel                        build and test with Bazel
#   make lint | format | sdist | wheel | clean

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

JAX ?=
SANITIZE ?=
TESTS ?= tests
ARGS ?=
# Warnings stop the developer's builds and CI, not a user with a newer compiler.
WERROR ?= $(if $(CI),ON,OFF)

# Jax 0.10 is the last for Python 3.11: the oldest pair is tested together.
PYTHONS := $(if $(filter 0.10.%,$(JAX)),3.11 3.12 3.13,3.13 3.12 3.11)
VENV := .venv$(addprefix -jax-,$(JAX))
BIN := $(VENV)/bin
PY := $(BIN)/python
HEADERS := $(VENV)/ffi-headers
PIP := $(PY) -m pip --disable-pip-version-check install -qq
# pip's own search path has old and new tools; the build takes those of the environment.
WITH_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
CPP := $(wildcard ffi/*.* ffi/*/*.*)

.PHONY: help demo test venv lint format cpp-test cuda sdist wheel bazel clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed
	$(PY) -P examples/train_transformer.py --out out/demo $(ARGS)

test: $(VENV)/.installed
	$(PY) -P -m pytest $(TESTS) $(ARGS)

venv: $(VENV)/.installed

# --- The virtual environment --------------------------------------------------
# Prints the first suitable Python: on the PATH, under pyenv (whose shims run only
# the versions that are switched on), else whatever python3 is.
define find_python
shim=$$(command -v python3 || true); \
for v in $(PYTHONS) ''; do \
  for p in python$${v:-3} "$${PYENV_ROOT:-$${HOME-}/.pyenv}"/versions/$$v*/bin/python$$v \
           "$${shim%/*}"/../versions/$$v*/bin/python$$v; do \
    if "$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1; then echo "$$p"; exit; fi; \
  done; \
done
endef

$(VENV)/.created:
	@python=$$($(find_python)); \
	if [ -z "$$python" ]; then \
	  echo 'jax_overlap needs Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip, and found none.'; \
	  echo 'On Debian or Ubuntu: apt-get install python3 python3-venv'; exit 1; fi; \
	if ! command -v $${CXX:-c++} >/dev/null && ! command -v g++ >/dev/null; then \
	  echo 'jax_overlap needs a C++17 compiler, and found neither c++ nor g++ (nor $$CXX).'; \
	  echo 'On Debian or Ubuntu: apt-get install g++'; exit 1; fi; \
	echo "$(VENV): $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@touch $@

# What builds: the requirements of pyproject.toml, except that of jaxlib only the
# headers are kept, as another jaxlib is installed beside them.
$(VENV)/.tools: $(VENV)/.created pyproject.toml
	@echo "$(VENV): build tools"
	@$(PY) -c "$$SPLIT_REQUIREMENTS" tools | xargs $(PIP) cmake ninja
	@rm -rf $(HEADERS) $(VENV)/download
	@$(PY) -c "$$SPLIT_REQUIREMENTS" jaxlib | \
	  xargs $(PY) -m pip --disable-pip-version-check download -qq --no-deps -d $(VENV)/download
	@$(PY) -c "$$UNPACK_HEADERS" $(VENV)/download $(HEADERS)
	@rm -rf $(VENV)/download
	@touch $@

define SPLIT_REQUIREMENTS
import sys, tomllib
requires = tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]
print(*[r for r in requires if r.startswith("jaxlib") == (sys.argv[1] == "jaxlib")], sep="\n")
endef
export SPLIT_REQUIREMENTS

define UNPACK_HEADERS
import pathlib, sys, zipfile
[wheel] = pathlib.Path(sys.argv[1]).glob("jaxlib*.whl")
with zipfile.ZipFile(wheel) as z:
  z.extractall(sys.argv[2], [n for n in z.namelist() if n.startswith("jaxlib/include/")])
endef
export UNPACK_HEADERS

# Editable: Python files are used where they lie, C++ is built into $(VENV). Changed
# sources are rebuilt in the same build folder.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(CPP) jax_overlap/__init__.py
	@echo "$(VENV): jax_overlap and what its tests need"
	@$(WITH_VENV) $(PIP) --no-build-isolation --editable '.[test]' $(addprefix jax==,$(JAX)) \
	  -Cbuild-dir=out/module-$(VENV) \
	  -Ccmake.define.JAX_OVERLAP_FFI_INCLUDE_DIR='$(CURDIR)/$(HEADERS)/jaxlib/include' \
	  -Ccmake.define.JAX_OVERLAP_TESTING=ON \
	  -Ccmake.define.JAX_OVERLAP_WERROR=$(WERROR)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "$(VENV): formatters and checkers"
	@$(PY) -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"])' \
	  | xargs $(PIP)
	@touch $@

# --- Formatting and checks ----------------------------------------------------
CLANG_FORMAT := $(BIN)/clang-format $(filter %.h %.cc %.cu %.cuh,$(CPP))

lint: $(VENV)/.dev
	@failed=; for check in '$(BIN)/ruff format --check' '$(BIN)/ruff check' \
	    '$(BIN)/pyright --pythonpath $(PY)' '$(CLANG_FORMAT) --dry-run -Werror'; do \
	  echo "$$check"; bash -c "$$check" || failed=1; done; [ -z "$$failed" ]

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(CLANG_FORMAT) -i

# --- C++ and CUDA -------------------------------------------------------------
CMAKE := $(WITH_VENV) cmake -S ffi -G Ninja -DPython_EXECUTABLE='$(CURDIR)/$(PY)' \
  -DJAX_OVERLAP_FFI_INCLUDE_DIR='$(CURDIR)/$(HEADERS)/jaxlib/include' \
  -DJAX_OVERLAP_MODULE=OFF -DJAX_OVERLAP_WERROR=ON

cpp-test: CPP_OUT := out/cpp$(addprefix -,$(SANITIZE))
cpp-test: $(VENV)/.tools
	@$(CMAKE) -B $(CPP_OUT) --log-level=WARNING -DJAX_OVERLAP_CUDA=OFF -DJAX_OVERLAP_BUILD_TESTS=ON \
	  -DJAX_OVERLAP_TESTING=ON -DJAX_OVERLAP_SANITIZE=$(SANITIZE)
	@$(WITH_VENV) cmake --build $(CPP_OUT)
	@$(WITH_VENV) ctest --test-dir $(CPP_OUT) --output-on-failure --no-tests=error $(ARGS)

# NVSHMEM, and the headers of cuBLAS and CUTLASS, come apart from the environment, which has no
# other use for them. fetch FOLDER PACKAGE WHAT-IT-HAS-THEN WHAT-OF-THE-WHEEL.
cuda: $(VENV)/.tools
	@release=$$($${CUDACXX:-nvcc} --version | sed -n 's/.*release \([0-9]*\).*/\1/p'); \
	$(PIP) --upgrade --no-deps --target out/nvshmem-cu$$release "nvidia-nvshmem-cu$$release>=3.4.5,<3.5"; \
	fetch() { \
	  if [ -e "$$1/$$3" ]; then return; fi; \
	  rm -rf "$$1"; mkdir -p "$$1/wheel"; \
	  $(PY) -m pip --disable-pip-version-check download -qq --no-deps -d "$$1/wheel" "$$2"; \
	  $(PY) -m zipfile -e "$$1"/wheel/*.whl "$$1/wheel"; \
	  mv "$$1"/wheel/$$4 "$$1"; rm -r "$$1/wheel"; }; \
	name=nvidia-cublas; if [ $$release = 12 ]; then name=nvidia-cublas-cu12; fi; \
	cublas=out/cublas-cu$$release; cutlass=out/cutlass; \
	fetch $$cublas "$$name>=$$release,<$$((release + 1))" cublasLt.h 'nvidia/*/include/*.h'; \
	fetch $$cutlass 'nvidia-cutlass>=4.2,<5' include cutlass_library/source/include; \
	$(CMAKE) -B out/cuda$$release --log-level=WARNING -DJAX_OVERLAP_CUDA=ON \
	  -DJAX_OVERLAP_CUBLAS_INCLUDE_DIR='$(CURDIR)'/$$cublas -DJAX_OVERLAP_BUILD_TESTS=ON \
	  -DJAX_OVERLAP_CUTLASS=ON -DJAX_OVERLAP_CUTLASS_INCLUDE_DIR='$(CURDIR)'/$$cutlass/include \
	  -DJAX_OVERLAP_NVSHMEM=ON -DJAX_OVERLAP_NVSHMEM_DIR='$(CURDIR)'/out/nvshmem-cu$$release/nvidia/nvshmem; \
	$(WITH_VENV) cmake --build out/cuda$$release --target \
	  jax_overlap_cuda jax_overlap_nvshmem gpu_programs

# --- Packages -----------------------------------------------------------------
# The wheel is built from the sdist, in an environment of its own, as by
# `pip install jax-overlap`.
wheel: BUILD_ARGS :=
sdist: BUILD_ARGS := --sdist
sdist wheel: $(VENV)/.tools
	@$(PIP) build
	@rm -rf dist
	$(PY) -m build $(BUILD_ARGS) --outdir dist

# --- Bazel --------------------------------------------------------------------
# Bazel's own Python has no editable jax_overlap, which would come before Bazel's.
BAZEL_PY := $(CURDIR)/out/bazel/venv/bin/python

out/bazel/venv/.installed: $(VENV)/.created pyproject.toml
	@echo 'out/bazel/venv: what Bazel takes from Python'
	@$(PY) -m venv --clear out/bazel/venv
	@$(BAZEL_PY) -m pip --disable-pip-version-check install -qq jax absl-py nanobind cmeel-eigen
	@touch $@

# The bazel on the PATH, else the one of the npm registry.
bazel: out/bazel/venv/.installed
	@bazel=$$(command -v bazel || ls out/bazel/node_modules/@bazel/*/bazel-* 2>/dev/null || true); \
	if [ -z "$$bazel" ]; then \
	  if ! command -v npm >/dev/null; then \
	    echo 'make bazel needs bazel (Debian: bazel-bootstrap), or npm to fetch it.'; exit 1; fi; \
	  npm install --silent --no-save --prefix out/bazel @bazel/bazel-linux_x64@2.1.0; \
	  bazel=$$(ls out/bazel/node_modules/@bazel/*/bazel-*); \
	fi; \
	PYTHON=$(BAZEL_PY) "$$bazel" --batch --output_user_root=$(CURDIR)/out/bazel/root \
	  test --symlink_prefix=out/bazel/ --noshow_progress --test_output=errors //ffi:all //:all $(ARGS)

clean:
	rm -rf out dist .venv .venv-* .pytest_cache .ruff_cache
