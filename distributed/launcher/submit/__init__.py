"""Hand a run to a scheduler: what is written for it, how it is submitted, followed and stopped. One file for each scheduler.

No scheduler is written here: `distributed train` starts the processes of each node, in the job as on any other machine.
"""
