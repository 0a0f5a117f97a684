"""Rewards of responses: the rows that they read (rows.py), and a reward model as one of them (reward_model.py).

Reward functions are named by functions.py and called by pool.py, through workers.py and worker_process.py in processes
of worker.py; how one is called is in calls.py, how many failures end a run in failures.py. Tools of a model and its
environments are called by tools.py in the same processes, there by tool_calls.py.
"""
