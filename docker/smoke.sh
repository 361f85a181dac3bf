#!/usr/bin/env bash
# Tries the image on a new machine in a minute: what it finds, and the quick start with its privacy statement.
#
#   docker/smoke.sh gpu [IMAGE]
#   docker/smoke.sh cpu [IMAGE]
#
# With `gpu`, a machine on which the container cannot use a GPU is refused. IMAGE is dp-lightning unless it is named.
set -euo pipefail
case ${1:-} in
  gpu) options=(--gpus all) ;;
  cpu) options=() ;;
  *)
    echo "usage: docker/smoke.sh gpu|cpu [IMAGE]" >&2
    exit 2
    ;;
esac
device=$1
image=${2:-dp-lightning}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  docker run --rm "${options[@]}" --user "$(id -u):$(id -g)" -v "$work:/project" "$image" "$@"
}

run doctor
run fit digits --trainer.accelerator "$device" --trainer.max_epochs 3 | tee "$work/printed"
grep -q '"num_steps": ' "$work"/lightning_logs/version_0/privacy_statement.json || {
  echo "FAILED: the run has left no privacy statement" >&2
  exit 1
}
echo "The image works. It ran on this device:"
grep -m 1 '^ *[Dd]evice' "$work/printed"
