#!/bin/sh
# The C++ compiler for horovod 0.28.1 as it lies on PyPI, against a torch or TensorFlow of today. Its build files name C++14 and
# C++17 and its last word on a command line wins over CXXFLAGS, but the headers of torch 2.13 and TensorFlow 2.21 are C++20. And
# the XLA operations include headers that TensorFlow has moved: without TENSORFLOW_VERSION that file is empty.
# Both may go once Horovod has a release after 0.28.1 (https://github.com/horovod/horovod/issues/3996).
# What only a debugger needs (-g) is left out, as it is up to half of the compiler's work; HOROVOD_DEBUG=1, Horovod's own, keeps it.
for argument; do
  shift
  case $argument in
  -std=c++14 | -std=c++17 | -std=gnu++14 | -std=gnu++17 | --std=c++17) argument=-std=c++20 ;;
  -g) [ "${HOROVOD_DEBUG:-}" = 1 ] || argument=-g0 ;;
  *xla_mpi_ops.cc) set -- "$@" -UTENSORFLOW_VERSION ;;
  esac
  set -- "$@" "$argument"
done
exec "${HOROVOD_REAL_CXX:-c++}" "$@"
