#!/usr/bin/env bash
# Print the Kubernetes JobSet for Llama 3 8B on one v5p slice of 32 chips.
#
#   scripts/gke.sh launch.image=REGISTRY/maxpipe:TAG launch.volume=gs://BUCKET --submit
set -euo pipefail
exec maxpipe launch gke llama3-8b \
  tokenizer.kind=huggingface tokenizer.path=/workdir/llama3/tokenizer.json \
  data.source=arrayrecord data.path=/workdir/text \
  train.steps=1000 train.batch_size=128 \
  launch.topology=v5p:2x4x4 launch.image=maxpipe:tpu launch.volume=gs://my-bucket \
  mesh.ici_stage=4 mesh.ici_fsdp=8 pipeline.repeats=2 pipeline.microbatches=16 \
  "$@"
