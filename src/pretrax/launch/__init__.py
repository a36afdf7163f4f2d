"""Starts and restarts the processes of a run. Does not import JAX: a failure of JAX must not end the launcher.

Any launcher, such as `local.py`, follows three rules:

- each process is `pretrax train` with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment;
- its exit code says what comes next: 0 done, 75 try again, 2 or 78 a mistake that would repeat itself, others a
  failure;
- `Restarts` decides from that code and the newest checkpoint whether and when all processes are restarted.
"""
