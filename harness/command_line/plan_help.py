"""The text of `acbench-plan --help`."""

from __future__ import annotations

PLAN_HELP = """\
acbench-plan predicts what trials need and take, on any hardware and any mesh; nothing runs.

  acbench-plan [-m] [options] [--json] [--trace]
  acbench-plan solve=FIELD hardware=NAME [options]
  acbench-plan -m search=N [options]
  acbench-plan --version | --help

Options are those of acbench (acbench --help lists groups and defaults), and:

  -m               a sweep: a=1,2 for values, a=glob(*) for all variants that need no number
  hardware=NAME    what is predicted for, such as h100, rtx4090, this_cpu; hardware.usable_gib=40 for a part;
                   ac=budget without a number then asks for what is usable, and glob(*) means it too
  solve=FIELD      batch_size, sequence_length, model.n_layers: the largest that fits;
                   mesh.dp_shard, mesh.tp, mesh.pp, microbatches: the smallest
  search=N         of a sweep's points, N that optuna chooses for low bytes and low step time (or FLOPs)
  --json           records as a JSON array on stdout
  --trace          records and steps are kept in outputs/<name>; acbench-report --format perfetto shows them

Exit status: 0 every point fits, 1 some do not, 2 the command was refused.

  acbench-plan -m model=llama_7b hardware=h100 mesh.dp_shard=8 ac=none,full,selective_op batch_size=24
  acbench-plan solve=batch_size hardware=a100 model=python model.factory=my_models:make ac=full
"""
