"""Text that starts a Ray cluster and a run on it: a script for Slurm, a job for KubeRay. Nothing is submitted.

Read in this order: checks, slurm, kuberay.
May import: types, utils, train.config.
"""
