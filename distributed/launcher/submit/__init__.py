"""Write the job of a run for a scheduler, submit it, follow it and stop it. Each scheduler has its own module.

The job calls `distributed train` on each node, which starts the processes of the node as outside of a scheduler.
"""
