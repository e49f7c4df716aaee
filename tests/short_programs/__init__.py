"""All short programs: whatever a training loop does in a few events, stock DDP sees the same.

configurations.py  what is wrapped, and with which options
events.py          what one rank does at each event, and what it has then
words.py           a program is a word of letters; which of them say something new
documented.py      differences that docs/differences.md describes, as rules over words
processes.py       ranks that play thousands of words, forked from one warm process
run.py             the command
"""
