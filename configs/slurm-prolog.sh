#!/bin/bash
# Prolog (slurm.conf: Prolog=/etc/slurm/ckptguard-prolog.sh): drains nothing and kills nothing. It only refuses to start a
# job whose run directory, named in its comment as ckptguard=RUN, has no checkpoint that is structurally sound.
#   sbatch --comment=ckptguard=/lustre/runs/a job.sbatch
set -u
CKPTGUARD=${CKPTGUARD:-ckptguard}
COMMENT=${SLURM_JOB_COMMENT:-}
case $COMMENT in
  *ckptguard=*) RUN=${COMMENT#*ckptguard=}; RUN=${RUN%%[, ]*} ;;
  *) exit 0 ;;
esac
# Structure only: seconds, whatever the size. The job script itself looks at every byte.
timeout 120 "$CKPTGUARD" preflight "$RUN" --depth structure >/dev/null
STATUS=$?
if [ "$STATUS" -eq 1 ]; then
  echo "print ckptguard: no checkpoint of $RUN may be resumed from; see: ckptguard preflight $RUN"
  exit 1
fi
# A fresh run, or one that could not be looked at from this node: the job script decides.
exit 0
