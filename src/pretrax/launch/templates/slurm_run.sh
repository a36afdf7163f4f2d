{# `wait` returns early when a trap has run, and knows the exit code of a process that has ended. `$!` is the supervisor: bash sets it when it forks, so it is known to a trap that runs before the next line does. -#}

trap 'kill -TERM $!' TERM              # near the time limit: save, and go on in another allocation
trap 'stopped=yes; kill -TERM $!' INT  # pretrax launch stop: save, and end
{{ command }} &
wait $!
while kill -0 $! 2> /dev/null; do wait $!; done
wait $!
code=$?
if [ $code = 143 ]; then code=75; fi  # ended by TERM before it trained
if [ $code = 137 ] && [ ! "$stopped" ]; then code=75; fi  # killed, such as for lack of memory

# Exit code 75: the run is not finished. A job that is canceled is not RUNNING any more, and must stay canceled.
if [ $code != 75 ]; then exit $code; fi
if [ "$stopped" ]; then exit 0; fi
for try in {1..60}; do  # a controller that restarts does not answer for some minutes
    if state=$(squeue --noheader --job=$SLURM_JOB_ID --format=%T); then
        if [ "$state" != RUNNING ]; then break; fi
        if said=$(scontrol requeue $SLURM_JOB_ID 2>&1); then break; fi
        echo "$said"
        if [[ $said = *disabled* ]]; then break; fi  # --no-requeue
    fi
    sleep 10
done
exit 75
