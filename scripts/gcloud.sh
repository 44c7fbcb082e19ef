#!/usr/bin/env bash
# Print launch scripts for Llama 3 8B on two v5p slices of 16 chips each, as TPU VMs.
#
#   scripts/gcloud.sh launch.zone=ZONE launch.program=/opt/venv/bin/maxpipe run.dir=/mnt/runs --submit
set -euo pipefail
exec maxpipe launch gcloud llama3-8b \
  tokenizer.kind=huggingface tokenizer.path=/mnt/shared/llama3/tokenizer.json \
  data.source=arrayrecord data.path=/mnt/shared/text \
  train.steps=1000 train.batch_size=128 \
  launch.topology=v5p:2x2x4 launch.slices=2 launch.zone=us-east5-a \
  mesh.dcn_stage=2 mesh.ici_stage=2 mesh.ici_fsdp=8 pipeline.repeats=2 pipeline.microbatches=16 \
  "$@"
