#!/usr/bin/env bash
# Trains the demo under torchrun; every argument is an override of the YAML:
#
#   bash examples/training_demo/run.sh --training.max_steps=15
#   bash examples/training_demo/run.sh --checkpoint.restore_from=LATEST
#
# NPROC: processes, 4 unless set. CONFIG: another YAML. PYTHON: another interpreter.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# The checkout itself, so that the demo also runs where hyper_resume is not installed.
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-4}" \
  -m hyper_resume.cli train "${CONFIG:-$here/demo.yaml}" "$@"
