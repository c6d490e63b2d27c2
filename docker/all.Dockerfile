# Every engine, on CPUs or GPUs (where Horovod's gradients go through host memory).
# docker build -f docker/all.Dockerfile [--build-arg VARIANT=cuda] -t distributed-all .
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
ARG VARIANT=cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG MORE=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
# Horovod is built from its source. Debian keeps one version of each; the tag of the base fixes the release.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends cmake g++ libopenmpi-dev make openmpi-bin && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE _distributed_trainer_guard.py ./
COPY distributed distributed
COPY examples/projects examples/projects
COPY scripts scripts
COPY docker/install.sh docker/install.sh
RUN sh docker/install.sh "$VARIANT" all \
    && PIP_CONSTRAINT=constraints.txt python scripts/build_horovod.py --with mpi tensorflow

FROM python:${PYTHON}
ENV PATH=/opt/venv/bin:$PATH
# For torch.compile, DeepSpeed's operators and MPI. Debian keeps one version of each; the tag of the base fixes the release.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ openmpi-bin openssh-client && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 trainer && install --directory --owner=trainer --group=trainer /home/trainer/runs
COPY --from=build /opt/venv /opt/venv
USER 1000
WORKDIR /home/trainer
HEALTHCHECK --interval=1m --timeout=20s CMD ["distributed", "runs"]
ENTRYPOINT ["distributed"]
CMD ["doctor"]
