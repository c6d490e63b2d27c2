#!/bin/sh
# Installs this checkout with the engines of one set, at the versions of constraints.txt:
#   install.sh cpu|cuda torch|horovod|tensorflow|all [OPTIONS OF PIP]
# MORE names further extras of pyproject.toml, such as tensorboard,mlflow.
# The Dockerfiles call it, and so does their test, with --dry-run.
set -eu

variant=$1
engines=$2
shift 2

case $variant in
cpu)
    # PyPI's torch for Linux is the CUDA build; CPU_INDEX holds the other.
    PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} ${CPU_INDEX:-}"
    tensorflow=tensorflow-cpu
    ;;
cuda)
    tensorflow=tensorflow-cuda
    ;;
*)
    echo "install.sh: VARIANT=$variant is neither cpu nor cuda" >&2
    exit 2
    ;;
esac

case $engines in
torch) extras=torch,deepspeed,ray ;;
horovod) extras=torch ;;
tensorflow) extras=$tensorflow ;;
all) extras=torch,deepspeed,ray,$tensorflow ;;
*)
    echo "install.sh: there is no set of engines '$engines': torch, horovod, tensorflow or all" >&2
    exit 2
    ;;
esac

export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}"
# The constraints pin the build's own requirements too, hence the variable and not only the option.
PIP_CONSTRAINT=constraints.txt exec python -m pip install "$@" ".[$extras${MORE:+,$MORE}]"
