#!/bin/bash
# An array job of cells of cleanrl_utils/benchmark.py, one cell per task. To change it (partition, memory, time limit,
# modules), copy it and name the copy: --slurm-template-path. Names in double braces are filled in; a line with one that
# has no value is left out. When a task is interrupted (exit code 75), it goes back into the queue and on from its checkpoint.
#SBATCH --job-name={{name}}
#SBATCH --array={{array}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks={{ntasks}}
#SBATCH --gpus-per-task={{gpus_per_task}}
#SBATCH --cpus-per-gpu={{cpus_per_gpu}}
#SBATCH --cpus-per-task={{cpus_per_task}}
#SBATCH --output="{{logs}}/%A_%a.txt"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@60

task=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
echo "task $task on $SLURMD_NODENAME, start $((${SLURM_RESTART_COUNT:-0} + 1))"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_ON_NODE:-1}}

# In the background, as bash runs a trap only between commands. SIGTERM comes a minute before the time limit.
trap 'woken=1; stopped=1; [ -z "$cell" ] || kill -TERM "$cell" 2> /dev/null' TERM
{{command}} &
cell=$!
[ -z "$stopped" ] || kill -TERM "$cell"
while :; do
    woken=
    wait "$cell"
    code=$?
    [ -n "$woken" ] || break # else it was the trap that ended the wait
done

# Not after scancel. By the name of the task: the number of its job may be that of the whole array.
for attempt in 1 2 3 4 5 6; do
    [ "$code" = 75 ] || break
    state=$(scontrol show job --oneliner "$task" 2> /dev/null | grep -o 'JobState=[A-Z_]*')
    case ${state#JobState=} in
        RUNNING | TIMEOUT | PREEMPTED)
            if [ "${SLURM_RESTART_COUNT:-0}" -ge {{requeues}} ]; then
                echo "task $task is left: it was started again {{requeues}} times (--slurm-requeues)"
                exit 1 # not 75, on which Slurm itself may be told to requeue
            fi
            scontrol requeue "$task" && break ;;
        ?*) break ;;
    esac
    sleep 10 # the controller does not answer
done
exit "$code"
