
while sleep 10; do
    nodes=$(squeue --noheader --job=$SLURM_JOB_ID --states=RUNNING --format=%N) && [ "$nodes" ] || continue
    names=$(scontrol show hostnames "$nodes") && [ "$names" ] || continue
    echo "$names" | grep --quiet --line-regexp --fixed-strings -- "$1" || scontrol requeue $SLURM_JOB_ID
done
