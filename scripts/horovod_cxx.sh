#!/bin/sh
# C++ compiler for building the released horovod 0.28.1 against current versions of torch and TensorFlow.
# Workaround (Horovod 0.28.1, horovod/horovod#3996; both changes may go when Horovod has a later release): its build files
# request C++14 and C++17 after CXXFLAGS, but the headers of torch 2.13 and TensorFlow 2.21 need C++20. Its XLA operations
# include headers that TensorFlow has moved; without TENSORFLOW_VERSION that file is empty.
# Debug information (-g) is left out, because it is up to half of the compiler's work. Horovod's own HOROVOD_DEBUG=1 keeps it.
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
