"""Starting the processes of a run, and starting them again. Imports no JAX: what fails there must not fail here.

A contract of three parts holds for any engine, of which `local.py` is the first:

- each process is `pretrax train` with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment;
- its exit code says what is next: 0 done, 75 try again, 2 or 78 a mistake that would come again, others a failure;
- `Restarts` decides, from that code and the newest checkpoint, whether and when the whole group starts again.
"""
