# TensorFlow and Keras, on CPUs or GPUs.
# docker build -f docker/tensorflow.Dockerfile [--build-arg VARIANT=cuda] -t distributed-tensorflow .
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
ARG VARIANT=cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG MORE=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE _distributed_trainer_guard.py ./
COPY distributed distributed
COPY examples/projects examples/projects
COPY docker/install.sh docker/install.sh
RUN sh docker/install.sh "$VARIANT" tensorflow

FROM python:${PYTHON}
ENV PATH=/opt/venv/bin:$PATH
RUN useradd --create-home --uid 1000 trainer && install --directory --owner=trainer --group=trainer /home/trainer/runs
COPY --from=build /opt/venv /opt/venv
USER 1000
WORKDIR /home/trainer
HEALTHCHECK --interval=1m --timeout=20s CMD ["distributed", "runs"]
ENTRYPOINT ["distributed"]
CMD ["doctor"]
