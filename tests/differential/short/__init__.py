"""All short programs: stock DDP and tritonddp must see the same after each event.

configurations.py  what is wrapped, and with which options
events.py          what one rank does at each event, and its state after it
words.py           a program is a word, one letter an event; documented differences, as rules
processes.py       ranks that play thousands of words, forked from one warm process
run.py             ``python tests/differential/run.py --kind short``, and the comparison
"""
