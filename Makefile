# Everything that is done with this project, from a fresh checkout on.
#
#   make help      this list
#   make demo      a file to four simulated nodes on this machine, twice; no root
#   make test      all tests; as root also those on a real Slurm cluster, whose packages it installs
#   make nightly   the tests of the test cluster itself, and repetitions that `make test` leaves out
#   make test-majors  cluster tests on another Slurm: of SUITE=trixie, or built from SLURM_SOURCE=…
#   make bench     beside other tools, on the test cluster; takes a while
#   make compare   beside another revision of itself (REVISION=HEAD~1)
#   make soak      ten minutes of random jobs, cancels and restarts (MINUTES=10, SEED=…)
#   make campaign  one fault after another, and what becomes of the jobs (FAULTS=1000, HOURS=…, SEED=…)
#   make check     the quick checks before a commit: lint, and the tests that need no cluster
#   make lint      formatting, types, import rules, spelling, scripts, the C code
#   make hooks     have git run the quick part of lint before each commit
#   make cluster   a shell on the test cluster, slurm-stage installed (NODES=4, KIND=folder)
#   make install   into PREFIX=/opt/slurm-stage
#   make deb       Debian packages in build/deb, for this machine's Debian and Slurm
#   make rpm       RPM packages in build/rpm, for this machine's Python and Slurm
#   make test-packages  the packages, by the documents, on a fresh Debian 12 and 13; takes minutes
#   make docs      the site, into build/docs
#   make man       the manual pages, into build/man
#   make reference  slurm-config/docs/reference and the template of stage.toml, from the code
#   make pictures  those in README, from a session and from tests/bench/nodes.json
#   make lock      renew the versions and hashes of the Python packages that it installs

# A Python of 3.11 or later that can make an environment.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# Tests that run at once: most of the time those on the cluster wait. Each worker has a cluster.
WORKERS ?= 3
NODES ?= 4
KIND ?= folder
MINUTES ?= 10
FAULTS ?= 1000
REVISION ?= HEAD~1
SUITE ?= trixie
# Those that depend most on the release of Slurm, or the one of pyslurm. Where time is short, FAILURES=
# leaves out those that depend less on it.
FAILURES ?= test_failures.py
TESTS ?= $(addprefix tests/cluster/,$(if $(PYSLURM),pyslurm_answers.py, \
	test_stage.py test_ways.py $(FAILURES)))
# Slurm 24.11 does not write to slurmd's log what a plugin says at the end of a job.
UNLOGGED = -k 'not slurmds_log'
PREFIX ?= /opt/slurm-stage
# What is in .venv besides what slurm-stage needs.
EXTRAS ?= local,lint,test
PARALLEL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# The tests that need neither Slurm nor a world of MPI ranks nor the package index.
UNIT = not cluster and not mpi and not install
ROOT := $(filter 0,$(shell id -u))

# What the test cluster, the plugin's build and their checks need, as Debian and Ubuntu name it.
# (On a machine with systemd, docker-registry, nginx-light and openssh-server start a service, which no
# test uses.)
PACKAGES = $(CLUSTER_PACKAGES) $(SERVER_PACKAGES) cppcheck clang-format clang-tidy shellcheck \
	charliecloud-runtime python3-dev mandoc zsh fish mmdebstrap $(if $(shell command -v npm),,npm) $(DEB_PACKAGES) lintian
CLUSTER_PACKAGES = $(SLURM_PACKAGES) munge openmpi-bin libpmix-dev iproute2 gcc make libc6-dev \
	fuse3 libfuse3-dev pkg-config squashfs-tools python3-venv procps util-linux util-linux-extra \
	e2fsprogs xfsprogs btrfs-progs openssh-client openssh-server
SLURM_PACKAGES = slurmctld slurmd slurm-client libslurm-dev slurm-wlm-basic-plugins
# The servers of the tests of sources, and what compresses and copies beside them.
SERVER_PACKAGES = libopenmpi-dev rsync zstd nginx-light openssl curl skopeo umoci docker-registry \
	python3-swift
# What a suite needs besides: the Slurm of sid has no plugin for Open MPI.
PACKAGES_sid = mpich
# What a Slurm that is built needs instead of Debian's, and pyslurm.
BUILD_PACKAGES = libmunge-dev python3-dev
# What `make deb` needs.
DEB_PACKAGES = build-essential debhelper libslurm-dev pkgconf python3-venv
# A server of Azure's blobs for the tests. Its libraries are those of that day.
AZURITE = azurite@3.33.0
AZURITE_DAY = 2026-11-01
# An MPICH beside Debian's Open MPI: as a package of Debian's, it would be in the loader's way.
MPICH = mpich==5.0.2
SCRIPTS = .ci/run packaging/install packaging/slurm-stage packaging/deb/build packaging/rpm/build \
	prolog/job_epilog prolog/job_prolog prolog/task_prolog prolog/stage-importer \
	slurm-config/shared-fs/moosefs slurm-config/shared-fs/beeond \
	tests/cluster/majors tests/cluster/namespaces.sh tests/packaging/site.sh \
	$(wildcard packaging/deb/debian/*.pre* packaging/deb/debian/*.post*)

.PHONY: demo help test nightly test-majors test-packages check lint hooks bench compare soak campaign cluster install deb \
	rpm docs man reference pictures lock packages deb-packages clean

demo: .venv/.done
	.venv/bin/stagectl demo
	@printf '\n# what else there is, in twenty minutes: slurm-config/docs/start/tutorial.md\n'

help:
	@sed -n 's/^#   make /make /p' Makefile

test: .venv/.done packages build/azurite/.done build/mpich/.done build/moosefs/.done
	.venv/bin/python -m pytest $(PARALLEL) -m 'not nightly$(if $(ROOT),, and not root)'
	$(if $(ROOT),,@echo 'The tests on the real cluster need root and were not run.' >&2; exit 1)

nightly: .venv/.done packages build/azurite/.done build/mpich/.done build/moosefs/.done
	.venv/bin/python -m pytest $(PARALLEL) -m nightly

# The servers' packages take long to install, and the tests that run by default need none. With other
# packages the root is made anew: one in which Slurm is built has them all from the start.
test-majors: packages
	SLURM_SOURCE='$(SLURM_SOURCE)' PYSLURM='$(PYSLURM)' PACKAGES='$(strip $(if $(SLURM_SOURCE), \
		$(filter-out $(SLURM_PACKAGES),$(CLUSTER_PACKAGES)) $(BUILD_PACKAGES) $(SERVER_PACKAGES), \
		$(CLUSTER_PACKAGES) $(PACKAGES_$(SUITE)) \
		$(if $(filter file,$(origin TESTS)),,$(SERVER_PACKAGES))))' \
		tests/cluster/majors $(SUITE) $(PARALLEL) -m 'not nightly' $(UNLOGGED) $(TESTS)

# The unit tests run on all cores, and report which lines they reach.
check: lint
	.venv/bin/python -m pytest --numprocesses auto --quiet --cov --cov-report term \
		-m '$(UNIT)$(if $(ROOT),, and not root)'

lint: .venv/.done packages
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	cd packaging && ../.venv/bin/python -m reference --check
	.venv/bin/codespell $$(git ls-files)
	shellcheck $(SCRIPTS)
	$(MAKE) --silent -C prolog/spank lint
	$(MAKE) --silent -C prolog/peers lint

hooks: .venv/.done packages
	.venv/bin/pre-commit install

compare: .venv/.done packages
	.venv/bin/python -m tests.bench.compare $(REVISION)

bench: .venv/.done packages
	.venv/bin/python -m tests.bench.bench
	.venv/bin/python -m tests.bench.partial
	.venv/bin/python -m tests.bench.startup
	.venv/bin/python -m tests.bench.cache
	.venv/bin/python -m tests.bench.trees
	.venv/bin/python -m tests.bench.decompress
	.venv/bin/python -m tests.bench.sources

soak: .venv/.done packages
	.venv/bin/python -m tests.cluster.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

campaign: .venv/.done packages
	.venv/bin/python -m tests.cluster.campaign --faults $(FAULTS) $(if $(HOURS),--hours $(HOURS)) \
		$(if $(SEED),--seed $(SEED))

cluster: .venv/.done packages
	.venv/bin/python -m tests.cluster.site --nodes $(NODES) --nvme $(KIND)

install:
	packaging/install $(PREFIX)

# The packages are for the system's Python.
deb: deb-packages docs
	PYTHON=/usr/bin/python3 packaging/install --download=build/wheels
	packaging/deb/build build/wheels build/docs build/deb

rpm: SYSTEM = /usr/bin/$(notdir $(PYTHON))
rpm: docs
	PYTHON=$(SYSTEM) packaging/install --download=build/wheels
	PYTHON=$(SYSTEM) packaging/rpm/build build/wheels build/docs build/rpm

test-packages: .venv/.done docs
	@command -v mmdebstrap >/dev/null || apt-get -qq install --no-install-recommends mmdebstrap >/dev/null
	.venv/bin/python -m pytest -rP tests/packaging/sites.py

# All pages are read each time, so that each link that leads nowhere is told.
docs: build/sphinx/.done
	@rm -rf build/docs
	build/sphinx/bin/sphinx-build -q -W --keep-going -E -d build/sphinx/trees -c packaging/docs . build/docs
	@rm -r build/docs/.buildinfo build/docs/_sources

man: .venv/.done
	cd packaging && ../.venv/bin/python -m man ../build/man

reference: .venv/.done
	cd packaging && ../.venv/bin/python -m reference

pictures: .venv/.done
	.venv/bin/python -m tests.documents.picture slurm-config/session.svg
	.venv/bin/python -m tests.bench.nodes --svg slurm-config/docs/nodes.svg

# For every Python that is supported: the hashes are those of all files of a version.
LOCK = build/lock/bin/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
	--no-header --no-emit-index-url --no-emit-find-links --annotation-style line
# soupsieve, of the site, is below 3: that needs Python 3.11.5, and Debian 12 has 3.11.2.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check pip-tools
	$(LOCK) --output-file packaging/requirements.lock pyproject.toml
	$(LOCK) --output-file packaging/build.lock --only-build-deps --build-deps-for wheel pyproject.toml
	$(LOCK) --output-file packaging/docs/requirements.lock packaging/docs/requirements.in

# Only root can install packages; whoever is not root finds out by what is missing.
packages: WANTED = $(PACKAGES)
deb-packages: WANTED = $(DEB_PACKAGES)
packages deb-packages:
ifneq ($(ROOT),)
	@dpkg --status $(WANTED) >/dev/null 2>&1 || { \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
		apt-get -qq install --no-install-recommends $(WANTED) >/dev/null; }
endif

.venv/.done: pyproject.toml packaging/requirements.lock
ifneq ($(ROOT),)
	@test -n "$(PYTHON)" || $(MAKE) packages
endif
	@python=$(PYTHON); python=$${python:-/usr/bin/python3}; \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'A Python 3.11 or later with its venv module is needed (apt install python3-venv).' >&2; \
		exit 1; }; \
	$$python -m venv --clear .venv
	@# What slurm-stage needs in the versions that it is installed with; a new release changes no test.
	@sed -n 's/^\([^ #]*==[^ ;\\]*\).*/\1/p' packaging/requirements.lock >.venv/constraints
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint .venv/constraints \
		--editable '.[$(EXTRAS)]'
	@touch $@

build/sphinx/.done: packaging/docs/requirements.lock | .venv/.done
	@$(PYTHON) -m venv --clear build/sphinx
	@build/sphinx/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--requirement packaging/docs/requirements.lock
	@touch $@

build/azurite/.done: Makefile | packages
ifneq ($(ROOT),)
	@npm install --silent --prefer-offline --no-audit --no-fund --ignore-scripts \
		--before $(AZURITE_DAY) --prefix build/azurite $(AZURITE)
	@touch $@
endif

# The programs alone: installed, the packages would start their services.
build/moosefs/.done: Makefile | packages
	@rm -rf build/moosefs && mkdir -p build/moosefs
	@cd build/moosefs && for name in master chunkserver client; do \
		apt-get -qq -o APT::Sandbox::User=root download moosefs-$$name && \
		dpkg-deb -x moosefs-$${name}_*.deb . && rm moosefs-$${name}_*.deb || exit; done
	@touch $@

build/mpich/.done: Makefile | .venv/.done
	@$(PYTHON) -m venv --clear build/mpich
	@build/mpich/bin/pip install --quiet --disable-pip-version-check $(MPICH)
	@touch $@

clean:
	rm -rf .venv build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
