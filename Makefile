# make train: install the core into .venv, train ppo.py on CartPole-v1 and evaluate it
# make test:  install everything the tests need into .venv, run the style gate, the linters and the tests
# ARGS goes to ppo.py or pytest: make train ARGS="--seed 2", make test ARGS="-k gae"

PYTHON ?= python3
ARGS ?=

.PHONY: train test
train test:
	@$(PYTHON) scripts/make.py $@ $(ARGS)
