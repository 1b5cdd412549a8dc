"""`bass batch`: answer the requests of a file in OpenAI's batch format.

requests.py turns a line into prompts, responses.py turns samples into a line, and answers.py has
the files that these lines are appended to; command.py runs the job.
"""
