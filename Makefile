# Two commands for a newcomer: `make demo` trains a small model with a whole swarm on this machine, `make test` runs
# every check and test. Both build .venv on the first call and reuse it afterwards.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Tests run in so many processes, three on two cores: two begin with tests that wait for daemons, the third one computes.
# What Python has compiled is kept for the next process and the next run, whatever the environment says: it is a third
# of the time that it takes to load the tests.
WORKERS ?= 3
# The Pythons that the tests ran with, as setup.cfg's classifiers name them.
TRIED := 3.11 3.12 3.13 3.14

.PHONY: demo test test-docker check format docs install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small model with a swarm of processes on this machine (about 3 minutes; DEMO='--minutes 5')"
	@echo "make test    format, lint, types and all tests"
	@echo "make test-docker  the image and both compose files, with a Docker engine"
	@echo "make check   format, lint and types alone"
	@echo "make format  rewrite the code in the project's format"
	@echo "make docs    these documents as a site, in build/site"
	@echo "make clean   remove .venv and caches"

$(INSTALLED): setup.cfg setup.py gossip/exchange/kernels.c pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is older. Name another one: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(TRIED)".split())' || \
	  echo "The tests ran with Python $(TRIED); $(PYTHON) is another one. If it fails: make clean, make PYTHON=python3.11 ..."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/noloco-node demo --web 0 $(DEMO)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --maxfail 20 -rs -m 'not docker' $(TESTS)

test-docker: $(INSTALLED)  # these tests take minutes, and have limits of their own
	$(BIN)/python -m pytest -rs -m docker -o timeout=0 -o faulthandler_timeout=0 tests/system/test_docker.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo "open build/site/docs/index.html"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
