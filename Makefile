# make train: install the core into .venv, train ppo.py on CartPole-v1 and evaluate it
# make test:  install everything the tests need into .venv, run the style gate, the linters and the tests
# make test-all: the same with the tests marked slow, before a release and where CONTRIBUTING.md asks for it
# make wheels: collect packages for a machine without a network, ARGS="--python 3.12 --extras atari -o wheels"
# ARGS goes to ppo.py or pytest: make train ARGS="--seed 2", make test ARGS="-k gae"

PYTHON ?= python3
ARGS ?=

.PHONY: train test test-all wheels
train test test-all wheels:
	@$(PYTHON) scripts/make.py $@ $(ARGS)
