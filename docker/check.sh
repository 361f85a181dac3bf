#!/usr/bin/env bash
# Builds the image of docker/Dockerfile and runs it, without a Docker daemon and without a registry:
#
#   docker/check.sh FOLDER
#
# It needs root, buildah and debootstrap, an hour at most, and 20 GB in FOLDER, which keeps the base, the image and what
# the runs have written; a second call takes what is there. The base is Debian bookworm, which has Python 3.11, under the
# name that the Dockerfile expects. BUILD_OPTIONS are further options of `buildah bud`, such as --volume for the settings
# of pip behind a proxy.
set -euo pipefail
if [ $# -ne 1 ]; then
  echo "usage: docker/check.sh FOLDER" >&2
  exit 2
fi
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
base=docker.io/library/python:3.11-slim
image=localhost/dp-lightning
export BUILDAH_ISOLATION=chroot
store=(--root "$folder/store" --runroot "$folder/runroot" --storage-driver "${STORAGE_DRIVER:-overlay}")

step() { printf '\n== %s\n' "$*"; }
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

step "The base image"
if ! buildah "${store[@]}" inspect --type image "$base" > /dev/null 2>&1; then
  [ -e "$folder/base/usr/bin/python" ] || {
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$folder/base" > "$folder/debootstrap.log"
    ln -s python3 "$folder/base/usr/bin/python"
  }
  container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" add -q "$container" "$folder/base" / > /dev/null
  # Debian's pip installs beside its own packages only if told to.
  buildah "${store[@]}" config --env PIP_BREAK_SYSTEM_PACKAGES=1 --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah "${store[@]}" commit -q --rm "$container" "$base" > /dev/null
  rm -rf "$folder/base"
fi

step "The image"
# shellcheck disable=SC2086 # options, split at spaces
buildah "${store[@]}" bud --pull-never --layers ${BUILD_OPTIONS:-} -f "$source/docker/Dockerfile" -t "$image" "$source" \
  > "$folder/build.log" 2>&1 || fail "the build; see $folder/build.log"

work=$folder/work
rm -rf "$work"
mkdir -p "$work" "$folder/cache"
chown 1000:1000 "$work"
chmod 1777 "$folder/cache"
container=$(buildah "${store[@]}" from --pull-never "$image")
trap 'buildah "${store[@]}" rm "$container" > /dev/null' EXIT

# As `docker run -v $work:/project dp-lightning ARGUMENTS`.
run() { buildah "${store[@]}" run --volume "$work:/project" --volume "$folder/cache:/cache" "$container" -- dpl "$@"; }

step "Who runs, and what it finds"
run --version
[ "$(buildah "${store[@]}" run "$container" -- id -u)" = 1000 ] || fail "the user is not 1000"
for variable in HF_HOME TORCH_HOME; do
  buildah "${store[@]}" run --volume "$folder/cache:/cache" "$container" -- sh -c "mkdir -p \$$variable && touch \$$variable/x" ||
    fail "weights cannot be kept in \$$variable"
done

step "The quick start: results in the working folder"
run fit digits
[ -e "$work/lightning_logs/version_0/result.json" ] || fail "no result in the working folder"
[ "$(stat -c %u "$work/lightning_logs/version_0/result.json")" = 1000 ] || fail "the result is not the user's"

step "A configuration and data of one's own"
buildah "${store[@]}" run --volume "$work:/project" "$container" -- python3 -c "
import numpy as np
rng = np.random.default_rng(0)
labels = np.arange(600) % 3
images = (rng.random((600, 16, 16, 3)) * 80 + 80 * labels[:, None, None, None]).astype(np.uint8)
np.savez('mine.npz', train_images=images[:500], train_labels=labels[:500], test_images=images[500:], test_labels=labels[500:])"
cat > "$work/mine.yaml" << 'YAML'
model: {class_path: SmallCNNModule}
data: {class_path: NpzImages, init_args: {path: mine.npz}}
privacy: {target_epsilon: 3.0, delta: 1.0e-4, expected_batch_size: 100}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}
trainer: {max_epochs: 150, devices: 1, enable_progress_bar: false}
YAML
stopped() { # what `docker stop` does: SIGTERM to the process, once it takes steps
  while ! ls "$work"/lightning_logs/version_1/checkpoints/*.ckpt > /dev/null 2>&1; do
    sleep 0.5
    kill -0 "$1" 2> /dev/null || return 0
  done
  kill -TERM "$(cat "$work/pid")"
}
buildah "${store[@]}" run --volume "$work:/project" --volume "$folder/cache:/cache" "$container" -- \
  sh -c 'echo $$ > pid; exec dpl fit mine.yaml' > "$folder/stopped.log" 2>&1 &
running=$!
stopped "$running"
code=0
wait "$running" || code=$?
tail -n 3 "$folder/stopped.log"
[ "$code" = 143 ] || fail "a run that was stopped ended with $code and not 143; see $folder/stopped.log"
ls "$work"/lightning_logs/version_1/checkpoints/interrupted-step=*.ckpt || fail "no checkpoint of the interruption"

step "It resumes"
run fit mine.yaml --ckpt_path last
grep -q '"completed": true' "$work"/lightning_logs/version_*/result.json || fail "the resumed run is not complete"
run verify "$(cd "$work" && ls -d lightning_logs/version_* | tail -n 1)"

step "Its size"
buildah "${store[@]}" images "$image"
echo "All of it works."
