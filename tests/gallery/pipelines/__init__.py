"""Defects of checkpointing in steps of several micro-batches; every module shows one."""
