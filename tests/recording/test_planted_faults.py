"""Each planted fault of :mod:`recording.faults` is found, and without it nothing is found."""

import contextlib

import pytest
from distributed import run_ranks
from hosts import emulated_hosts

from recording.faults import FAULTS
from recording.programs import PROGRAMS, play


@pytest.mark.long
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_found(name: str) -> None:
    run_ranks(find, 4 if FAULTS[name].is_on_hosts else 2, name, interprets=True)


def find(name: str) -> None:
    fault = FAULTS[name]
    options = {"steps": fault.steps, "elsewhere": fault.elsewhere}
    with emulated_hosts(2) if fault.is_on_hosts else contextlib.nullcontext():
        sound = play(PROGRAMS[fault.program], **options).recorder
        assert not sound.races, sound.report()
        before = {each.place for each in sound.waits if not each.age}
        with fault.plant():
            if fault.error is not None:
                with pytest.raises(RuntimeError, match=fault.error):
                    play(PROGRAMS[fault.program], **options)
                return
            found = play(PROGRAMS[fault.program], **options).recorder
    if fault.is_wait:
        assert {each.place for each in found.waits if not each.age} - before
    else:
        assert found.races
