# A newcomer needs Python 3.11+ and make: every target first brings up .venv as constraints.txt pins it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install ablation gpu wheels test test-processors test-thorough breaks mutation formats fuzz test-torch test-minimal test-oldest-transformers sweep-transformers lint types docs check api audit release clean

install: $(READY)

# torch first, pinned: whatever comes after finds it and asks for no other build. All files are compiled, since a test's processes
# would each compile what they import where PYTHONDONTWRITEBYTECODE is set; on all cores, as pip does not. torch has a file for
# newer Pythons, which cannot be compiled.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(READY)

ablation: $(READY)
	$(BIN)/manifold-tying ablate --out runs/ablation

# All that needs a GPU, by PYTHON with its own torch and without network: packages come from wheels/, if that is there.
# GPU_OPTIONS="--total 9" or others of python -m benchmarks.gpu. The same command again resumes.
OUT ?= runs/gpu
gpu:
	test ! -d wheels || test -d wheels/installed || { \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --target wheels/draft wheels/*.whl && mv wheels/draft wheels/installed; }
	PYTHONPATH="$(CURDIR)/wheels/installed$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m benchmarks.gpu --out $(OUT) $(GPU_OPTIONS)

# For `make gpu` elsewhere: every package of constraints.txt but torch, and peers, for Linux and the Python version WHEELS_FOR.
WHEELS_FOR ?= $(shell $(PYTHON) -c "import platform; print(platform.python_version())")
wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --python-version $(WHEELS_FOR) --dest wheels \
		$$(grep -v -e "^torch==" -e "^#" constraints.txt) liger-kernel geotorch pogo-torch

# A worker per core, each test in one thread; a file's tests stay together, since what they share is made once per worker.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --durations 40

# All property tests with 20 times the examples and a new seed. Repeat a failure with SEED=. An hour; not in CI.
SEED ?= $(shell date +%s)
PROPERTIES = $$(grep -lE "hypothesis|manifold_tying.testing|testing as mtt" -r tests --include="test_*.py")
test-thorough: $(READY)
	@echo "make test-thorough SEED=$(SEED)"
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --hypothesis-profile=thorough --hypothesis-seed=$(SEED) $(PROPERTIES)

# Does a test notice when the package is broken on purpose? Five minutes; not in CI.
breaks: $(READY)
	$(BIN)/python tests/breaks/run.py

# Small random changes of the numerical packages by cosmic-ray: how many do the tests notice? An hour on one core; not in CI.
# MUTATION="poet/spec.py --mutants 30 --seed 1" for others.
mutation: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)-mutation \
		cosmic-ray==8.7.0 parso==0.8.7 attrs==26.1.0 stevedore==5.10.0 coverage==7.17.5
	TRITON_INTERPRET=1 PYTHONPATH="$(CURDIR):$(CURDIR)/$(VENV)-mutation" $(BIN)/python tests/breaks/mutation.py $(MUTATION)

# The tests as on lesser processors, which oneDNN and ATen imitate. Half an hour; not in CI.
PROCESSORS := ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default
test-processors: $(READY)
	failed=; for processor in $(PROCESSORS); do \
		echo "$$processor"; env $$processor TORCHINDUCTOR_CACHE_DIR=$$(mktemp -d) \
		$(BIN)/python -m pytest --numprocesses auto --dist loadfile || failed="$$failed $$processor"; \
	done; test -z "$$failed" || { echo "failed with$$failed"; exit 1; }

# All tests with another torch, by default the lower bound, and any PYTHON. The build that PyPI has, which on Linux brings gigabytes of CUDA.
TORCH := 2.11.0
test-torch:
	$(PYTHON) -m venv $(VENV)-torch
	grep -v -e "^torch==" -e "^triton==" constraints.txt > $(VENV)-torch/constraints.txt
	$(VENV)-torch/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)-torch/constraints.txt \
		"torch==$(TORCH)" --editable ".[dev]"
	$(VENV)-torch/bin/python -m pytest --numprocesses auto --dist loadfile

# The core without any extra: the tests that need none, against the installed package.
test-minimal:
	$(PYTHON) -m venv $(VENV)-minimal
	$(VENV)-minimal/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)-minimal/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt . pytest hypothesis
	cd tests && ../$(VENV)-minimal/bin/python -m pytest --ignore unit/parametrizations/test_plain_optimizers.py \
		unit/linalg unit/manifolds unit/optim unit/parametrizations unit/tying

# The lower bound of the extra `huggingface`, in a venv of its own, with whatever its own bounds then bring.
OLDEST := 5.0.0
test-oldest-transformers:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable ".[huggingface,train]" "transformers==$(OLDEST)" "torch==$$(sed -n 's/^torch==//p' constraints.txt)" \
		peft bitsandbytes pytest hypothesis
	$(VENV)-oldest/bin/python -m pytest --ignore tests/huggingface/test_huggingface_trl.py \
		tests/huggingface tests/unit/training/test_continued_pretraining.py

# Every language-model class of transformers: converts and works from end to end, or is refused unchanged. Half an hour; not in CI.
sweep-transformers: $(READY)
	$(BIN)/python tests/sweep_transformers.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The pages as a site in site/: tutorials, how-tos, an API reference. A broken link or a missing name fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types docs test

# Records public names, parameters and defaults, which a test compares.
api: $(READY)
	$(BIN)/python tests/unit/test_public_api.py

# A sample of each format that this version saves, which the tests of later versions read.
formats: $(READY)
	$(BIN)/python tests/saved_formats.py

# Damaged files for every reader of foreign bytes: some minutes each.
fuzz: $(READY)
	$(BIN)/python -m pytest -q tests/fuzz.py

# Known vulnerabilities of what constraints.txt pins. Needs the network.
audit: $(READY)
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	grep -v "^torch==" constraints.txt > $(VENV)-audit/pinned.txt
	$(VENV)-audit/bin/pip-audit --requirement $(VENV)-audit/pinned.txt --no-deps --disable-pip

# Wheel and source distribution in dist/, the README's programs run with the wheel in an empty environment, the pages in site/.
release: docs
	rm -rf dist && $(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	sed -n '/^```python/,/^```/{/^```/!p}' README.md > dist/readme.py && test -s dist/readme.py && cd dist && venv/bin/python readme.py
	rm -rf dist/venv dist/readme.py && ls -l dist

clean:
	rm -rf site $(VENV) $(VENV)-oldest $(VENV)-torch $(VENV)-minimal $(VENV)-mutation $(VENV)-audit dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
