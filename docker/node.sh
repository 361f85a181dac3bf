#!/usr/bin/env bash
# One node's part of a run on several nodes, in the container of docker/Dockerfile. On every node:
#
#   docker/node.sh RANK NODES ADDRESS FIT_ARGUMENTS...
#
# RANK counts the nodes from 0, ADDRESS is the name or address of node 0, and FIT_ARGUMENTS follow `dpl fit`. The current
# folder, with data and runs, is on a file system that all nodes share. `docker stop --time 120` ends the
# run in order, with a checkpoint. PORT (29500) is the port on node 0 at which the nodes meet.
set -eu
if [ $# -lt 3 ]; then
  echo "usage: docker/node.sh RANK NODES ADDRESS FIT_ARGUMENTS..." >&2
  exit 2
fi
rank=$1 nodes=$2 address=$3
shift 3
exec docker run --rm --gpus all --network host --ipc host \
  -v "$PWD:/project" -v dpl-weights:/cache --entrypoint torchrun dp-lightning \
  --nnodes "$nodes" --node-rank "$rank" --nproc-per-node gpu \
  --master-addr "$address" --master-port "${PORT:-29500}" --no-python \
  dpl fit "$@" --trainer.num_nodes "$nodes" --trainer.devices auto
