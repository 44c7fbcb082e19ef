#!/usr/bin/env bash
# Print the SLURM job for Llama 3 8B on four nodes with eight H100 GPUs each.
#
#   scripts/slurm.sh launch.queue=PARTITION launch.program=/shared/venv/bin/maxpipe --submit
set -euo pipefail
exec maxpipe launch slurm llama3-8b \
  tokenizer.kind=huggingface tokenizer.path=/shared/llama3/tokenizer.json \
  data.source=arrayrecord data.path=/shared/text \
  train.steps=1000 train.batch_size=128 \
  launch.topology=h100:8 launch.slices=4 \
  mesh.dcn_stage=4 mesh.ici_fsdp=8 pipeline.repeats=2 pipeline.microbatches=16 \
  "$@"
