#!/usr/bin/env bash
# sbatch launch/slurm.sh [arguments of trainer.run]: Horovod ranks on the nodes that Slurm gives, one for each task.
# Submit it from the project's root. The nodes share the file system, and ssh works between them without a password.
#SBATCH --job-name=ctr-trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append  # a job that is started again keeps the log of before
#SBATCH --no-kill  # when a node is lost, the job stays on the others, for the restarts below
#SBATCH --requeue  # Slurm starts it again when it takes the nodes back
#SBATCH --signal=B:TERM@300  # 300 s before the time is over, the job is asked to stop and saves its state
# With one GPU for each rank: sbatch --gpus-per-node=4 launch/slurm.sh …
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?runs under sbatch}"  # Slurm runs a copy of this file from a folder of its own
export CTR_THREADS=${CTR_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CTR_THREADS}
exec launch/cluster.sh --restarts "${CTR_RESTARTS:-3}" --min_ranks "${CTR_MIN_RANKS:-${SLURM_NTASKS_PER_NODE:-1}}" ${CTR_NIC:+-i "$CTR_NIC"} \
  <(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=${SLURM_NTASKS_PER_NODE:-1}/") "$@"
