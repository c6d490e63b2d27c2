"""Cluster environments: what the variables of torchrun, Slurm, Open MPI, Horovod, TF_CONFIG and pods say of this process.

Each environment is one file with a function `worker`, and a function `node` where the environment can have one task per node,
and one entry in `registry.py`. Starting processes belongs to the rest of `launching`.
"""
