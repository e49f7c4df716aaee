"""All short programs: whatever a training loop does in a few events, stock DDP sees the same.

configurations.py  what is wrapped, and with which options
events.py          what one rank does at each event, and what it has then
words.py           a program is a word, one letter an event; documented differences, as rules
comparison.py      what stock DDP had after each event, and what the wrapper had
processes.py       ranks that play thousands of words, forked from one warm process
run.py             ``python tests/differential/run.py --kind short``
"""
