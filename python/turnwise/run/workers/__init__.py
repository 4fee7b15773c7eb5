"""Workers of a run: the loop's side, with the settings that workers can't serve, and the process of one worker.

Read in this order: attach, process.
May import: types, utils, arena, inference, tasks, train, run, workers.
"""
