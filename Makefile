# Everything here works on a fresh machine: each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: setup demo test lint bench soak docs clean

setup: $(VENV)/.ready

# torch first and pinned: a range would pull a build for GPUs.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,s3,serve,postgres]'
	touch $@

$(VENV)/.tests-ready: $(VENV)/.ready requirements-test.txt scripts/install-test-tools
	PYTHON=$(PY) scripts/install-test-tools
	touch $@

demo: setup
	$(VENV)/bin/ckptguard demo

test: $(VENV)/.tests-ready
	PYTHON=$(PY) scripts/run-tests

lint: $(VENV)/.tests-ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHON=$(PY) scripts/type-check

bench: $(VENV)/.tests-ready
	for b in benchmarks/*.py; do echo "== $$b"; $(PY) $$b || exit 1; done

soak: $(VENV)/.tests-ready
	$(PY) -m pytest -m soak --timeout 7200

docs: setup
	$(PY) -m ckptguard.report.reference

clean:
	rm -rf $(VENV) build dist *.egg-info
